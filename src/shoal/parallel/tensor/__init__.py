"""Tensor parallelism: regions between columns and rows, and the vocabulary, run on parts."""
