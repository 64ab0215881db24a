"""Floor 4: what rounds must bear of loops, models and optimizers that farflung has not written."""
