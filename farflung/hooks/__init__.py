"""Floor 4: how rounds fit loops, models and optimizers that farflung has not written."""
