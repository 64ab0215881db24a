"""A package of somebody else's, which adds a method, a codec, a network and a workload to farflung."""
