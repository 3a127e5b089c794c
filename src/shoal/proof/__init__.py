"""Proof: a serial run in plain PyTorch, the same job under a strategy, and a certificate of how far they are apart."""

from shoal.proof.certify import Certificate, verify

__all__ = ["Certificate", "verify"]
