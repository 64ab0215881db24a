"""What benches share: their catalog, one store of results, tables, and the runs that they are made of."""
