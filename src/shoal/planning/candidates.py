"""`Candidates`: many strategies of one family of expressions as columns of numbers, and the way back to expressions.

A row is dp(outer, compress) * axes in the order of its placement * modifiers. Columns are what formulas and masks read;
only the few rows that a user sees ever become `Strategy` objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.estimate.cost.inputs import RECOMPUTE, SCHEDULES
from shoal.strategy import (
    CompressTerm,
    Strategy,
    SyncTerm,
    accumulate,
    amp,
    cp,
    dp,
    ep,
    none,
    pp,
    ps,
    recompute,
    tp,
)
from shoal.strategy.terms.compress import compressors
from shoal.strategy.terms.sync import hogwild

Column = NDArray[Any]


def distinct(column: Column) -> Column:
    """Sorted, each once. `np.unique` without a further result imports numpy.ma, which takes longer than most plans."""
    return np.unique(column, return_index=True)[0]


SEARCHED: tuple[CompressTerm, ...] = tuple(method.sample() for method in compressors() if method.searched)
"""Compressions that plans try: of each kind one or two (fewer bits, signs, fewer elements, low rank)."""
COMPRESSORS: tuple[CompressTerm, ...] = (
    none(),
    *SEARCHED,
    *(
        term
        for method in compressors()
        for term in method.measured()
        if term not in SEARCHED and term.ring_bytes(1.0, 1.0, ranks=2, itemsize=4) is not None
    ),
)
"""Codes of the column `compress`: nothing, those that are searched, and the others with an estimate."""

ORDERS: tuple[tuple[str, ...], ...] = (
    ("tp", "cp", "ep", "dp", "pp"),
    ("tp", "cp", "ep", "pp", "dp"),
    ("cp", "tp", "ep", "dp", "pp"),
    ("ep", "tp", "cp", "dp", "pp"),
    ("dp", "tp", "cp", "ep", "pp"),
    ("pp", "tp", "cp", "ep", "dp"),
)
"""Codes of the column `order`, innermost first: each axis innermost once, and dp outermost instead of pp."""


FAMILIES = (
    "serial",
    "dp",
    "zero",
    "tp",
    "pp",
    "cp",
    "dp + tp",
    "dp + pp",
    "tp + pp",
    "3D (dp, tp, pp)",
    "with cp",
    "with ep",
    "hybrid shards",
    "compressed",
    "local steps",
)
"""By the axes that a strategy uses; of those that apply the last."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Columns of whole numbers, all of one length."""

    outer: Column
    """The outer level of dp; 1 where there is none. It never shards, lies outermost, and is the one that compresses or
    is averaged now and then."""
    dp: Column
    """The inner (or only) level of dp, which shards by `zero`. Ranks of ep are not counted."""
    ep: Column
    tp: Column
    cp: Column
    pp: Column
    ulysses: Column
    """1 where cp exchanges parts of the sequence for heads; 0: a ring, or no cp."""
    zero: Column
    sequence: Column
    micro: Column
    """Micro-batches of a replica in a step."""
    schedule: Column
    """Indices of SCHEDULES; 0 ("none") without a pipeline."""
    chunks: Column
    recompute: Column
    """Indices of RECOMPUTE."""
    order: Column
    """Indices of ORDERS."""
    compress: Column
    """Indices of COMPRESSORS."""
    local: Column
    """Steps after which the outer level averages its parameters; 0 where it sums gradients in every step."""
    global_batch: int
    precision: str = "bf16"
    sync: SyncTerm | None = None
    """How islands stay together, where `local` is not 0; its h is that column's."""

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def replicas(self) -> Column:
        """Parts into which the global batch is split."""
        return self.outer * self.dp * self.ep

    @property
    def world(self) -> Column:
        """Ranks."""
        return self.replicas * self.tp * self.cp * self.pp

    @property
    def micro_batch(self) -> Column:
        """Samples of a micro-batch."""
        return self.global_batch // (self.replicas * self.micro)

    @cached_property
    def family(self) -> Column:
        """Indices of FAMILIES."""
        data = (self.dp * self.outer > 1) | (self.ep > 1)
        tensor, pipeline, context = self.tp > 1, self.pp > 1, self.cp > 1
        masks = (
            data,
            data & (self.zero > 0),
            tensor,
            pipeline,
            context,
            data & tensor,
            data & pipeline,
            tensor & pipeline,
            tensor & pipeline & data,
            context & (data | tensor | pipeline),
            self.ep > 1,
            (self.outer > 1) & (self.compress == 0),
            self.compress > 0,
            self.local > 0,
        )
        found = np.zeros(len(self), dtype=np.int8)
        for code, mask in enumerate(masks, start=1):
            found[mask] = code
        return found

    def rows(self, chosen: Any) -> Candidates:
        """Some of the rows."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)  # Found once, not for each column.
        return self.put({name: getattr(self, name)[chosen] for name in COLUMNS})

    def put(self, columns: Mapping[str, Any]) -> Candidates:
        """Other columns of the same question."""
        return replace(self, **columns)

    def strategy(self, row: int) -> Strategy:
        """One row as an expression. Axes of one and modifiers that do nothing are left out."""
        value = {name: int(getattr(self, name)[row]) for name in COLUMNS}
        pipeline = value["pp"] > 1
        axes: dict[str, Any] = {
            "dp": dp(value["dp"], zero=value["zero"]) if value["dp"] > 1 else None,
            "ep": ep(value["ep"]) if value["ep"] > 1 else None,
            "tp": tp(value["tp"], sequence=bool(value["sequence"])) if value["tp"] > 1 else None,
            "cp": cp(value["cp"], "ulysses" if value["ulysses"] else "ring") if value["cp"] > 1 else None,
            "pp": pp(value["pp"], SCHEDULES[value["schedule"]], micro=value["micro"], chunks=value["chunks"])
            if pipeline
            else None,
        }
        terms: list[Any] = []
        if value["outer"] > 1:
            level = dp(value["outer"], compress=COMPRESSORS[value["compress"]])
            if value["local"]:
                assert self.sync is not None
                level = level.replace(sync=self.sync.replace(h=value["local"]))
            terms.append(level)
        terms += [axes[axis] for axis in reversed(ORDERS[value["order"]]) if axes[axis] is not None]
        if value["micro"] > 1 and not pipeline:
            terms.append(accumulate(value["micro"]))
        if value["recompute"]:
            terms.append(recompute(RECOMPUTE[value["recompute"]]))
        if self.precision in ("bf16", "fp16"):
            terms.append(amp(self.precision))
        return Strategy(*terms)


COLUMNS = tuple(field.name for field in fields(Candidates) if field.name not in ("global_batch", "precision", "sync"))


def of_strategies(strategies: Sequence[Strategy], *, global_batch: int) -> Candidates:
    """Expressions of this family as columns; one outside it is refused in a sentence."""
    rows = [_row(each) for each in strategies]
    rules = [rule for rule in [row.pop("sync") for row in rows] if rule is not None]
    if any(rule.replace(h=rules[0].period) != rules[0] for rule in rules):
        several = ", ".join(sorted(set(map(str, rules))))
        raise ValueError(f"islands with different sync ({several}); estimate one at a time")
    precisions = {row.pop("precision") for row in rows} or {"fp32"}
    if len(precisions) > 1:
        raise ValueError(f"strategies of several precisions ({', '.join(sorted(precisions))}); estimate one at a time")
    return Candidates(
        **{name: np.array([row[name] for row in rows], dtype=np.int64) for name in COLUMNS},
        global_batch=global_batch,
        precision=precisions.pop(),
        sync=next(iter(rules), None),
    )


def _row(strategy: Strategy) -> dict[str, Any]:
    levels = strategy.dp_levels
    strange = [term for term in strategy.terms if type(term) not in (dp, pp, tp, cp, ep, recompute, amp, accumulate)]
    if strange or len(levels) > 2:
        what = str(strange[0]) if strange else f"{len(levels)} levels of dp"
        raise ValueError(
            f"{strategy}: there is no estimate for {what}; dp (two levels), pp, tp, cp, ep, accumulate, "
            "recompute and amp have one"
        )
    for level in levels:
        known = dp(1, sync=level.sync) if level.sync.period is not None else dp(1)
        if str(level.replace(n=1, zero=0, compress=none())) != str(known):
            if isinstance(level.via, ps) or isinstance(level.sync, hogwild):
                raise ValueError(f"{strategy}: plans have no estimate for {level}; `shoal simulate` has one")
            raise ValueError(
                f"{strategy}: there is no estimate for {level}; only sync=bsp() and rules of islands, "
                "such as local(h), by all-reduce have one"
            )
    alone = [level for level in levels if not isinstance(level.compress, none) or level.sync.period is not None]
    inner = levels[-1] if levels and (len(levels) == 2 or not alone) else None
    outer = levels[0] if levels and (len(levels) == 2 or alone) else None
    if outer is not None and (outer.zero or (inner is not None and inner in alone)):
        raise ValueError(
            f"{strategy}: there is no estimate for zero outside, or compression or local steps inside; "
            "shard the inner level, compress or average the outer one"
        )
    loose = outer.sync if outer is not None and outer.sync.period is not None and outer.n > 1 else None
    term = outer.compress if outer is not None else none()
    if term not in COMPRESSORS:
        some = ", ".join(str(each) for each in COMPRESSORS[1:])
        raise ValueError(f"{strategy}: there is no estimate for {term}; there is one for {some}")
    pipeline, tensor, context, experts = strategy.term(pp), strategy.term(tp), strategy.term(cp), strategy.term(ep)
    kept, precise = strategy.term(recompute), strategy.term(amp)
    placed = [axis.name for axis in reversed(strategy.axes) if axis.term is not outer and axis.term.n > 1]
    placed = ["dp" if name.startswith("dp") else name for name in placed]
    order = next((code for code, each in enumerate(ORDERS) if [a for a in each if a in placed] == placed), None)
    if order is None or (outer is not None and strategy.axes[0].term is not outer and outer.n > 1):
        raise ValueError(
            f"{strategy}: there is no estimate for this placement; the last axes lie innermost, "
            "try the order dp * pp * dp * cp * tp"
        )
    return {
        "outer": outer.n if outer else 1,
        "dp": inner.n if inner else 1,
        "ep": experts.n if experts else 1,
        "tp": tensor.n if tensor else 1,
        "cp": context.n if context else 1,
        "pp": pipeline.n if pipeline else 1,
        "ulysses": int(bool(context and context.n > 1 and context.method == "ulysses")),
        "zero": inner.zero if inner and inner.n > 1 else 0,
        "sequence": int(bool(tensor and tensor.n > 1 and tensor.sequence)),
        "micro": strategy.micro_batches,
        "schedule": SCHEDULES.index(pipeline.schedule) if pipeline and pipeline.n > 1 else 0,
        "chunks": pipeline.chunks if pipeline else 1,
        "recompute": RECOMPUTE.index(kept.kind) if kept else 0,
        "order": order,
        "compress": COMPRESSORS.index(term),
        "local": loose.period if loose else 0,
        "sync": loose,
        "precision": precise.dtype if precise else "fp32",
    }
