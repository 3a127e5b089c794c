"""Faults of distributed L-BFGS, planted on purpose."""

from __future__ import annotations

from typing import Any

import shoal.parallel.engine as engine
from shoal.proof.entry import parallel_run


def own_products(arguments: dict[str, Any], channel: Any) -> Any:
    """Each rank takes the dot products of its own slices for those of all."""
    engine.sum_over_ranks = lambda engine: None
    return parallel_run(arguments, channel)
