"""The closed list: every term there is, by name. Nothing outside this list can stand in a strategy."""

from __future__ import annotations

from shoal.strategy.terms.axes import AxisTerm, cp, dp, ensemble, ep, pp, spatial, tp
from shoal.strategy.terms.compress import (
    CompressTerm,
    dgc,
    fp16,
    gtopk,
    hitopk,
    int8,
    mstopk,
    none,
    onebit,
    powersgd,
    qsgd,
    randomk,
    sign,
    sketch,
    ternary,
    threshold,
    topk,
)
from shoal.strategy.terms.modifiers import ModifierTerm, accumulate, amp, offload, recompute
from shoal.strategy.terms.sync import (
    SyncTerm,
    asp,
    bmuf,
    bsp,
    diloco,
    elastic,
    gossip,
    hogwild,
    local,
    softsync,
    ssp,
)
from shoal.strategy.terms.term import REGISTRY, Term
from shoal.strategy.terms.via import ViaTerm, allreduce, ps, shared

__all__ = [
    "REGISTRY", "AxisTerm", "CompressTerm", "ModifierTerm", "SyncTerm", "Term", "ViaTerm", "accumulate",
    "allreduce", "amp", "asp", "bmuf", "bsp", "cp", "dgc", "diloco", "dp", "elastic", "ensemble", "ep",
    "fp16", "gossip", "gtopk", "hitopk", "hogwild", "int8", "local", "mstopk", "none", "offload", "onebit",
    "powersgd", "pp", "ps", "qsgd", "randomk", "recompute", "shared", "sign", "sketch", "softsync",
    "spatial", "ssp", "ternary", "threshold", "topk", "tp",
]  # fmt: skip
