"""Compressors, one file each, found by `strategy/terms/compress.py`."""
