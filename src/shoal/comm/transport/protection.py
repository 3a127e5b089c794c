"""What protects a link between hosts: a tag on each block of its stream, by a key that only its two ends can derive.

HMAC-SHA256 comes with Python. AES-GMAC, ten times as fast on processors with AES instructions, is taken where every
rank has the package `cryptography`. Ranks name what they have in values signed with the token, so no stranger can
weaken the choice. SHOAL_LINK_AUTH=off leaves tags out, on private networks.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TAG_BYTES = 16
OFF = "off"

Tag = Callable[[int, Any], bytes]
"""From the number of a block and its bytes, which begin with that number."""


class WrongProtection(ValueError):
    """Ranks that do not agree on how links are protected."""


def _hmac_sha256(key: bytes) -> Tag:
    return lambda number, data: hmac.digest(key, data, "sha256")[:TAG_BYTES]


def _aes_gmac(key: bytes) -> Tag:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(key)
    # All is authenticated and nothing encrypted. A key serves one direction of one link, so no number comes twice.
    return lambda number, data: cipher.encrypt(number.to_bytes(12, "little"), b"", data)


METHODS: dict[str, Callable[[bytes], Tag]] = {"aes-gmac": _aes_gmac, "hmac-sha256": _hmac_sha256}
"""Fastest first."""


def available(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What this rank can do, or that it is to do without."""
    asked = environment.get("SHOAL_LINK_AUTH", "")
    if asked == OFF:
        return [OFF]
    if asked and asked not in METHODS:
        raise WrongProtection(f"SHOAL_LINK_AUTH is {asked!r}: expected off, {', '.join(METHODS)} or nothing")
    try:
        import cryptography  # noqa: F401
    except ImportError:
        found = ["hmac-sha256"]
    else:
        found = list(METHODS)
    if asked and asked not in found:
        raise WrongProtection(f"SHOAL_LINK_AUTH is {asked!r}, which needs the package `cryptography`: install it")
    return [asked] if asked else found


def choose(offered: Sequence[Sequence[str]]) -> str:
    """The best that all ranks have."""
    for name in (OFF, *METHODS):
        if all(name in each for each in offered):
            return name
    rows = "; ".join(f"rank {rank}: {', '.join(each)}" for rank, each in enumerate(offered))
    raise WrongProtection(f"ranks do not agree on how links are protected ({rows}): set SHOAL_LINK_AUTH alike on all")
