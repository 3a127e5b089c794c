"""Ways in which islands stay together, one file each, found by `strategy/terms/sync.py`."""
