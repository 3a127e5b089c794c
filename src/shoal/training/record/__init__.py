"""The run folder: what a run does, written down as it does it, and read back."""
