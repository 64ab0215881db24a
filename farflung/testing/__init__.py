"""Helpers for tests and measurements of farflung: hosts in network namespaces, peers of a run, members that lie.

They need nothing of a test framework. `hosts` needs Linux and root; `peers` and `liars` need `farflung[internet]`.
"""
