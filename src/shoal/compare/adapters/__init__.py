"""The adapters: one file for each, found by listing this folder and the entry points `shoal.frameworks`.

A file `torch_ddp.py` defines `ADAPTER`, or `ADAPTERS` by name where one framework has several modes.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from shoal.common.suggest import did_you_mean

if TYPE_CHECKING:
    from shoal.compare.adapter import Adapter

GROUP = "shoal.frameworks"


class UnknownContestant(ValueError):
    """A name that is neither a strategy nor an adapter."""


@functools.cache
def adapters() -> dict[str, Adapter]:
    """All adapters by name; those of other packages last, and never in the place of one of ours."""
    found: dict[str, Adapter] = {}
    for module in sorted(each.name for each in iter_modules(__path__)):
        found |= _of(module.replace("_", "-"), import_module(f"{__name__}.{module}"))
    for point in entry_points(group=GROUP):
        for name, adapter in _of(point.name, point.load()).items():
            if name in found:
                raise UnknownContestant(f"the package {point.value} names its adapter {name!r}, which exists already")
            found[name] = adapter
    return found


def _of(name: str, given: Any) -> dict[str, Adapter]:
    several = getattr(given, "ADAPTERS", None)
    if several is not None:
        return dict(several)
    found = getattr(given, "ADAPTER", given)
    return {name: found() if isinstance(found, type) else found}


def adapter_of(name: str) -> Adapter:
    """The adapter of a name."""
    known = adapters()
    if name not in known:
        raise UnknownContestant(
            f"{name!r} is no strategy and no framework{did_you_mean(name, known)}; frameworks: {', '.join(known)}"
        )
    return known[name]
