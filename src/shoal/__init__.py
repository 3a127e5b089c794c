"""Shoal trains one neural network on many machines by any technique of distributed deep learning.

Strategies are ordinary values: `from shoal import dp, tp` and multiply. What needs torch is loaded when asked for.
"""

from __future__ import annotations

from typing import Any

from shoal import strategy as _strategy
from shoal.strategy import *  # noqa: F403

__version__ = "0.1.0"
__all__ = list(dict.fromkeys([*_strategy.__all__, *_strategy.REGISTRY]))

_LATER = {
    "LayoutHints": "shoal.job.hints",
    "engine": "shoal.training.own_loop",
    "layout_of": "shoal.layout.layout",
    "train_job": "shoal.training.local",
    "verify": "shoal.proof.certify",
    "Certificate": "shoal.proof.certify",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    if name in _strategy.REGISTRY:
        return _strategy.REGISTRY[name]
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
