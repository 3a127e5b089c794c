"""The name that a misspelt one was meant to be, as every refusal proposes it."""

from __future__ import annotations

from collections.abc import Iterable

NEAR = 0.5
"""How alike two names are, from 0 to 1, before one is proposed for the other."""
LONGEST = 40
"""Characters of a name that are compared: the rest of a long text would only cost time."""


def nearest_name(wrong: str, valid: Iterable[str], *, near: float = NEAR) -> str | None:
    """The valid name that looks most like the wrong one in any case of letters, or None if none does."""
    from difflib import get_close_matches  # Only an error pays for this import.

    folded = {name.lower(): name for name in valid}
    found = get_close_matches(wrong[:LONGEST].lower(), list(folded), n=1, cutoff=near)
    return folded[found[0]] if found else None


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """The text " (did you mean 'dgx-a100'?)", to follow the wrong name; empty if no valid name is near."""
    near = nearest_name(wrong, valid)
    return f" (did you mean {near!r}?)" if near is not None else ""
