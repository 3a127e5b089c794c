"""Weights of another training as the start of a job: files that hold them, and how their names are matched."""
