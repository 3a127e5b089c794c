"""Tests of what to train: jobs, tasks, data and their order."""
