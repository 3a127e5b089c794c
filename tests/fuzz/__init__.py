"""Random small jobs under random strategies, held against a plain PyTorch loop that shares no code with Shoal."""
