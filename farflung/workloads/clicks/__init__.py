"""Recommenders: which click comes, of what is known before it. Read `workload.py` first."""
