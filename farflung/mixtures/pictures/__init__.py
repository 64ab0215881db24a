"""Mixtures of networks that draw (arXiv 2501.05450): experts of parts of the pictures, which k-means finds.

Read `modeling.py` first.
"""
