"""Small pictures of classes, drawn by a network that learns to turn noise into them. Read `workload.py` first."""
