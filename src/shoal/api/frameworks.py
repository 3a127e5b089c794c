"""The frameworks that Shoal's strategies can be compared with."""

from __future__ import annotations


def frameworks() -> list[dict[str, str]]:
    """Name, title, the strategy that does the same, and why one cannot run here."""
    from shoal.compare.adapters import adapters

    return [
        {"name": name, "title": each.title, "same_as": each.same_as.format(n="n"), "missing": each.missing()}
        for name, each in adapters().items()
    ]
