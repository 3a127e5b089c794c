"""Spatial parallelism: image planes over ranks, with halo exchange."""
