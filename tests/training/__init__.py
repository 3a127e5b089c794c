"""Tests of training: ranks, the loop, checkpoints, the record."""
