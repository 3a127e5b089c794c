"""Pipeline parallelism: a model in stages, and the orders in which they run."""
