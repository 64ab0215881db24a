"""Floor 2: cores. A part of a model that computes without the rest, so that weak replicas can train it alone."""
