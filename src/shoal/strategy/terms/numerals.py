"""Small numbers as words, because "eight replicas each take an eighth" reads better than "8 replicas each
take 1/8".
"""

from __future__ import annotations

_COUNTS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_SHARES = {
    1: ("all", "whole"),
    2: ("half", "halves"),
    3: ("a third", "thirds"),
    4: ("a quarter", "quarters"),
    5: ("a fifth", "fifths"),
    6: ("a sixth", "sixths"),
    7: ("a seventh", "sevenths"),
    8: ("an eighth", "eighths"),
    9: ("a ninth", "ninths"),
    10: ("a tenth", "tenths"),
    12: ("a twelfth", "twelfths"),
    16: ("a sixteenth", "sixteenths"),
}


def count(number: int) -> str:
    """A count: "eight" for 8, "1,024" for 1024."""
    return _COUNTS[number] if number < len(_COUNTS) else f"{number:,}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: "one replica", "eight replicas"."""
    return f"{count(number)} {noun if number == 1 else plural or noun + 's'}"


def share(parts: int) -> str:
    """One part of this number: "an eighth" for 8."""
    return _SHARES[parts][0] if parts in _SHARES else f"1/{parts}"


def shares(parts: int) -> str:
    """Cut into this number of parts: "in eighths" for 8."""
    return "not at all" if parts == 1 else f"in {_SHARES[parts][1] if parts in _SHARES else f'{parts:,} parts'}"


def every(number: int, noun: str) -> str:
    """How often: "every step", "every 50 steps"."""
    return f"every {noun}" if number == 1 else f"every {number:,} {noun}s"


def percent(fraction: float) -> str:
    """A fraction as a percentage: "1%" for 0.01."""
    return f"{100 * fraction:g}%"


def capital(sentence: str) -> str:
    """The sentence with a capital first letter; the rest stays as it is."""
    return sentence[:1].upper() + sentence[1:]
