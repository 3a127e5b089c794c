"""Checkpoints: written whole or not at all, verified before they are read, read by any strategy."""
