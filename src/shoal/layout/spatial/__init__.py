"""How image planes are cut among ranks, for spatial parallelism."""
