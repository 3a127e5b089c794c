"""Collectives on messages: each algorithm once, for any number of ranks and any size."""
