"""Contestants of `benchmarks/parallel.py`: for each axis the training loops that one would write by hand in PyTorch,
and the limit, which is the same work of a rank without any communication.
"""
