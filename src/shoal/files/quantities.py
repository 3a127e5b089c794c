"""Quantities with their units: "10 Gb/s", "64 GB", "7 us".

Networks are sold in gigabits and memory in gigabytes, so a bare number is eight times wrong half of the time. A file of
a user therefore names the unit, and b is a bit, B a byte.
"""

from __future__ import annotations

import re
from math import isfinite

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.].*?)\s*")
_BITS = {"b": 1 / 8, "bit": 1 / 8, "bits": 1 / 8, "B": 1.0}
_RATE = re.compile(r"(Ki|Mi|Gi|Ti|[kKMGTP]?)(bits?|b|B)(/s|ps)")
_SIZE = re.compile(r"(Ki|Mi|Gi|Ti|[kKMGTP]?)(B)")


class BadQuantity(ValueError):
    """A text that is no quantity of the kind expected; the message says what would be."""


def rate(text: object) -> float:
    """Bytes a second, from "10 Gb/s", "25 GB/s" or "100 Gbps"."""
    number, unit = _split(text, 'a rate such as "10 Gb/s" (gigabits) or "25 GB/s" (gigabytes)')
    found = _RATE.fullmatch(unit)
    if found is None:
        raise BadQuantity(f'{text!r} is no rate; write for example "10 Gb/s" (gigabits) or "25 GB/s" (gigabytes)')
    return number * _PREFIXES[found[1]] * _BITS[found[2]]


def size(text: object) -> float:
    """Bytes, from "64 GB" or "80 GiB"."""
    number, unit = _split(text, 'a size such as "64 GB"')
    found = _SIZE.fullmatch(unit)
    if found is None:
        raise BadQuantity(f'{text!r} is no size in bytes; write for example "64 GB" or "80 GiB"')
    return number * _PREFIXES[found[1]]


def duration(text: object) -> float:
    """Seconds, from "7 us", "0.1 ms" or "2 s"."""
    number, unit = _split(text, 'a time such as "7 us"')
    if unit not in _TIMES:
        raise BadQuantity(f'{text!r} is no time; write for example "7 us" or "0.2 ms"')
    return number * _TIMES[unit]


def _split(text: object, expected: str) -> tuple[float, str]:
    found = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise BadQuantity(f"{text!r} has no unit; expected {expected}")
    try:
        number = float(found[1])
    except ValueError:
        raise BadQuantity(f"{text!r} does not begin with a number; expected {expected}") from None
    if not isfinite(number):
        raise BadQuantity(f"{text!r} is not finite; expected {expected}")
    if number < 0:
        raise BadQuantity(f"{text!r} is negative; expected {expected}")
    return number, found[2]
