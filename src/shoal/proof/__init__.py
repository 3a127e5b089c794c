"""Proof: a serial run in plain PyTorch, the same job under a strategy, and a certificate of how far they differ."""
