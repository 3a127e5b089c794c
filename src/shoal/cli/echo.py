"""A strategy as it was understood, and as it was typed where the two read differently (defaults are not printed)."""

from __future__ import annotations


def echoed(strategy: object, typed: str | None) -> str:
    """`dp(2)` for "dp(2)"; `dp(2)  (typed: dp(2, zero=0))` for "dp(2, zero=0)"."""
    text = str(strategy)
    if typed is None or _plain(typed) == _plain(text):
        return text
    return f"{text}  (typed: {' '.join(typed.split())})"


def _plain(text: str) -> str:
    return "".join(text.split()).replace("'", '"')
