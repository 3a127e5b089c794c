"""Measuring this machine's collectives and links: on ranks (`measure.py`), and what follows from the times."""
