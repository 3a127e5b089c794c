"""Algorithms of an all-reduce, one file each, found by `strategy/terms/all_reduce.py`."""
