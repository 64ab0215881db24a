"""Floor 3: fitting a model into a machine's memory at the least cost in time."""
