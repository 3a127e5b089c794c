"""Checkpoints: written atomically, verified before they are read, readable by any strategy."""
