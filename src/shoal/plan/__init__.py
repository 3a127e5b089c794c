"""Choosing a strategy: enumerate all that are legal, price them in one pass, rank them, say what a change would do."""
