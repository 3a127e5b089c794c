"""Offload: what is not in use waits one level below, in host memory or on disk."""
