"""N replicas in one process, under a virtual clock; and the clock, links and computation alone, to time runs with."""
