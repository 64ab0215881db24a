"""Floor 5: one replica's whole run. Read `trainer.py` first."""
