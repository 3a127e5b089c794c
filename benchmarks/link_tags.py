"""What it costs one core to authenticate what passes between hosts: GB/s of each kind of tag, by size of block.

Kinds from the package `cryptography` are measured where it is installed. Figures: docs/wire.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 20)
KEY = os.urandom(32)
ROUNDS = 7


def kinds() -> dict[str, Callable[[bytes], object]]:
    found: dict[str, Callable[[bytes], object]] = {
        "keyed BLAKE2b": lambda data: hashlib.blake2b(data, key=KEY, digest_size=16).digest(),
        "HMAC-SHA256": lambda data: hmac.digest(KEY, data, "sha256"),
    }
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return found
    cipher, nonce = AESGCM(KEY), bytes(12)
    found["AES-256-GMAC"] = lambda data: cipher.encrypt(nonce, b"", data)
    found["AES-256-GCM"] = lambda data: cipher.encrypt(nonce, data, None)
    return found


def gb_per_s(tag: Callable[[bytes], object], size: int) -> float:
    """The best of a few rounds over 32 MB."""
    data, count = os.urandom(size), max(1, (32 << 20) // size)
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        for _ in range(count):
            tag(data)
        best_s = min(best_s, time.perf_counter() - start_s)
    return size * count / best_s / 1e9


if __name__ == "__main__":
    print("GB/s".ljust(16) + "".join(f"{size:>12,} B" for size in SIZES))
    for name, tag in kinds().items():
        print(name.ljust(16) + "".join(f"{gb_per_s(tag, size):14.2f}" for size in SIZES))
