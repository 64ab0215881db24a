"""Floor 5: what a run would cost, before anyone pays for it."""
