"""Whole states for newcomers: what is told of them, whom a newcomer believes, and how it fetches them."""
