"""What a method reaches: losses for bytes, steps and hours, of real training."""
