"""Floor 2: what is trained, and on what data."""
