"""Benchmarks by question: `python -m bench list` tells which there are."""
