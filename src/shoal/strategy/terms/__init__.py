"""The closed list: every term there is, by name. Nothing outside this list can stand in a strategy.

Techniques that are a file of their own (`shoal/technique`) are in `REGISTRY` like all others, and can be imported from
here by name; only what is asked for is loaded.
"""

from __future__ import annotations

from typing import Any

from shoal.strategy.terms.axes import AxisTerm, cp, dp, ensemble, ep, pp, spatial, tp
from shoal.strategy.terms.compress import CompressTerm, none
from shoal.strategy.terms.modifiers import ModifierTerm, accumulate, amp, offload, recompute
from shoal.strategy.terms.sync import (
    SyncTerm,
    asp,
    bsp,
    hogwild,
    softsync,
    ssp,
)
from shoal.strategy.terms.term import REGISTRY, Term
from shoal.strategy.terms.via import ViaTerm, allreduce, ps, shared

__all__ = [
    "REGISTRY",
    "AxisTerm",
    "CompressTerm",
    "ModifierTerm",
    "SyncTerm",
    "Term",
    "ViaTerm",
    "accumulate",
    "allreduce",
    "amp",
    "asp",
    "bsp",
    "cp",
    "dp",
    "ensemble",
    "ep",
    "hogwild",
    "none",
    "offload",
    "pp",
    "ps",
    "recompute",
    "shared",
    "softsync",
    "spatial",
    "ssp",
    "tp",
]


def __getattr__(name: str) -> Any:
    """A term that is a file of its own."""
    if name in REGISTRY:
        return REGISTRY[name]
    raise AttributeError(f"there is no term called {name}")
