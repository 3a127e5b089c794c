"""Every legal strategy of a model on a number of devices, generated as columns: no loop runs over strategies.

The space: degrees of dp, ep, tp, cp and pp whose product is the number of devices; zero 0 to 3; hybrid shards
(dp(outer) * dp(inner, zero=3)); tp with and without sequence; micro-batches; schedules and chunks; recomputation;
placements. Ulysses and compressors come after a first estimate, on rows where attention's messages or gradients take
time (`exchanged`, `compressed`). No two rows are equivalent: of those that would be, the simplest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shoal.common.numbers import divisors
from shoal.estimate.cost.inputs import RECOMPUTE, SCHEDULES
from shoal.planning.candidates import COLUMNS, ORDERS, SEARCHED, Candidates, Column
from shoal.planning.legal import legal
from shoal.strategy import ModelFacts, Strategy, SyncTerm, dp, is_legal

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Samples in a micro-batch; the full share of a replica is tried too where it is smaller."""
CHUNKS = (2, 3, 4, 6, 8)
PIPELINES: tuple[tuple[str, int], ...] = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    *(("interleaved", chunks) for chunks in CHUNKS),
)
"""(schedule, chunks). Not pipedream: it changes what is learned, and clipping and tied weights forbid it."""
AXES = ("tp", "cp", "ep", "dp", "pp")
FEWEST_TOKENS = 256
"""Of a sequence on one rank of cp: with fewer, attention's blocks stand empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Values that are tried for what is not a degree; a smaller space answers sooner."""

    zeros: tuple[int, ...] = (0, 1, 2, 3)
    sequences: tuple[int, ...] = (0, 1)
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    pipelines: tuple[tuple[str, int], ...] = PIPELINES
    recomputes: tuple[str, ...] = RECOMPUTE
    orders: tuple[int, ...] = tuple(range(len(ORDERS)))


FULL_SPACE = Space()


def enumerate_legal(
    *, world: int, facts: ModelFacts, node: int | None = None, precision: str = "bf16", space: Space = FULL_SPACE
) -> Candidates:
    """All rows of the space that are legal. `node`, the devices of the innermost level, says where an outer level of dp
    may lie (replicas on separate nodes) and whether placement matters at all; None or one node: no outer level, one
    placement.
    """
    if facts.global_batch is None:
        raise ValueError("a plan needs a global batch; give one")
    several = node is not None and node < world
    degrees = _degrees(world=world, facts=facts, node=node if several else None)
    columns = _crossed(degrees, sequence=np.array(space.sequences))
    columns = _kept(columns, (columns["sequence"] == 0) | (columns["tp"] > 1))
    columns = _crossed(columns, zero=np.array(space.zeros))
    columns = _kept(columns, _worth_sharding(columns))
    columns["ulysses"] = columns["compress"] = columns["local"] = np.zeros_like(columns["zero"])
    columns = _micro_batched(columns, global_batch=facts.global_batch, sizes=space.micro_batches)
    schedules = [(0, 1), *((SCHEDULES.index(name), chunks) for name, chunks in space.pipelines)]
    columns = _crossed(
        columns, keep=lambda each: (each["pp"] > 1) == (each["pipeline"] > 0), pipeline=np.arange(len(schedules))
    )
    columns = _crossed(
        columns,
        keep=lambda each: _canonical_order(each) & ((each["outer"] == 1) | (each["order"] == 0)),
        order=np.array(space.orders if several else (0,)),
    )
    columns = _crossed(columns, recompute=np.array([RECOMPUTE.index(each) for each in space.recomputes]))
    columns["schedule"], columns["chunks"] = (
        np.array(each, dtype=np.int32)[columns["pipeline"]] for each in zip(*schedules, strict=True)
    )
    found = Candidates(
        **{name: columns[name] for name in COLUMNS}, global_batch=facts.global_batch, precision=precision, sync=None
    )
    return found.rows(legal(found, world=world, facts=facts))


def _degrees(*, world: int, facts: ModelFacts, node: int | None) -> dict[str, Column]:
    """Sizes of the axes: all factorisations of the world that layers, heads and experts leave possible."""
    every = divisors(world)
    limits = {
        "pp": [n for n in every if facts.layers is None or n <= facts.layers],
        "ep": [n for n in every if facts.experts and facts.experts % n == 0] or [1],
        "tp": [n for n in every if _divides(n, facts.heads) and _divides(n, facts.kv_heads)],
        "cp": [n for n in every if n == 1 or (facts.sequence and facts.sequence // n >= FEWEST_TOKENS)],
        "outer": every,
    }
    sizes = np.array(list(product(*(limits[axis] for axis in ("pp", "ep", "tp", "cp")))), dtype=np.int64)
    columns = dict(zip(("pp", "ep", "tp", "cp"), sizes.T, strict=True))
    columns = _kept(columns, world % np.prod(sizes, axis=1) == 0)
    columns = _crossed(columns, outer=np.array(limits["outer"] if node is not None else [1], dtype=np.int64))
    inner = columns["pp"] * columns["ep"] * columns["tp"] * columns["cp"] * columns["outer"]
    columns = _kept(columns, world % inner == 0)
    inner = columns["pp"] * columns["ep"] * columns["tp"] * columns["cp"]
    columns["dp"] = world // (inner * columns["outer"])
    if node is not None:
        # Its replicas are on separate nodes; otherwise the level would not be slow.
        columns = _kept(columns, (columns["outer"] == 1) | ((world // columns["outer"]) % node == 0))
    return {name: column.astype(np.int32) for name, column in columns.items()}


def _divides(size: int, parts: int | None) -> bool:
    return parts is None or parts % size == 0


def _worth_sharding(columns: dict[str, Column]) -> Column:
    """zero needs replicas that hold the same; an outer level without compression is there to keep shards inside."""
    zero = columns["zero"]
    return ((zero == 0) | (columns["dp"] > 1)) & ((columns["outer"] == 1) | (zero == 3))


def exchanged(rows: Candidates, *, world: int, facts: ModelFacts) -> Candidates:
    """The rows with Ulysses in place of the ring, where heads divide."""
    turned = rows.put({"ulysses": np.ones_like(rows.cp)})
    return turned.rows((rows.cp > 1) & legal(turned, world=world, facts=facts))


def compressible(rows: Candidates, *, node: int) -> Column:
    """Dense rows in which dp lies outermost and leaves the nodes, and shards at most optimiser states inside them."""
    outer = _between_nodes(rows, node=node)
    outermost = (rows.order == 1) | ((rows.pp == 1) & (rows.order == 0))
    return (
        (rows.outer == 1)
        & (rows.compress == 0)
        & outermost
        & (outer > 1)
        & ((rows.zero == 0) | ((rows.zero == 1) & (rows.dp > outer)))
    )


def compressed(rows: Candidates, *, node: int) -> Candidates:
    """Those of the rows that can be, with what of dp lies between nodes as an outer level under each of SEARCHED."""
    rows = rows.rows(compressible(rows, node=node))
    outer = _between_nodes(rows, node=node)
    columns = {name: getattr(rows, name) for name in COLUMNS if name != "compress"}
    columns |= {"outer": outer, "dp": rows.dp // outer}
    return rows.put(_crossed(columns, compress=np.arange(1, 1 + len(SEARCHED))))


def averaged(rows: Candidates, *, node: int, sync: SyncTerm, periods: Sequence[int] = ()) -> Candidates:
    """`compressible` rows with what of dp lies between nodes as islands that are averaged: dense, and where the rules
    allow it under each of SEARCHED."""
    outer = _between_nodes(rows, node=node)
    columns = {name: getattr(rows, name) for name in COLUMNS if name not in ("local", "compress")}
    columns |= {"outer": outer, "dp": rows.dp // outer}
    codes = [0, *(code for code, term in enumerate(SEARCHED, 1) if is_legal(Strategy(dp(2, sync=sync, compress=term))))]
    columns = _crossed(columns, local=np.array(periods or [sync.period or 1], dtype=np.int64))
    return rows.put({**_crossed(columns, compress=np.array(codes)), "sync": sync})


def _between_nodes(rows: Candidates, *, node: int) -> Column:
    """Replicas of dp that lie on different nodes, where dp lies outermost."""
    return np.gcd(rows.dp, np.maximum(1, rows.world // node))


def _micro_batched(columns: dict[str, Column], *, global_batch: int, sizes: tuple[int, ...]) -> dict[str, Column]:
    share = global_batch // (columns["outer"] * columns["dp"] * columns["ep"])
    columns = _crossed({**columns, "share": share}, size=np.array([*sizes, 0], dtype=np.int64))
    # The last size stands for the full share, where that is none of the others.
    full = (columns["size"] == 0) & ~np.isin(columns["share"], sizes) & (columns["share"] < max(sizes))
    size = np.where(full, np.maximum(1, columns["share"]), columns["size"])
    columns["micro"] = columns["share"] // np.maximum(1, size)
    return _kept(columns, (size > 0) & (columns["micro"] >= 1) & (columns["share"] % np.maximum(1, size) == 0))


def _canonical_order(columns: Mapping[str, Column]) -> Column:
    """Of the placements that agree on all axes larger than one the first."""
    first = np.array([_first_alike(present) for present in range(2 ** len(AXES))])
    present = sum((columns[axis] > 1).astype(np.int64) << bit for bit, axis in enumerate(AXES))
    return first[present, columns["order"]] == columns["order"]


def _first_alike(present: int) -> list[int]:
    there = [axis for bit, axis in enumerate(AXES) if present >> bit & 1]
    placed = [[axis for axis in order if axis in there] for order in ORDERS]
    return [placed.index(each) for each in placed]


class _Crossed(Mapping[str, Column]):
    """Every row with every value of a further column. A column is laid out only when it is asked for."""

    def __init__(self, columns: dict[str, Column], name: str, values: Column) -> None:
        size = len(next(iter(columns.values())))
        self.columns, self.name, self.fresh = columns, name, np.tile(values.astype(np.int32), size)
        self.rows = np.repeat(np.arange(size), len(values))

    def __getitem__(self, name: str) -> Column:
        return self.fresh if name == self.name else self.columns[name][self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.columns, self.name))

    def __len__(self) -> int:
        return len(self.columns) + 1


def _crossed(
    columns: dict[str, Column], keep: Callable[[Mapping[str, Column]], Column] | None = None, **more: Column
) -> dict[str, Column]:
    """Every row with every value of a further column, or those of them that are to be kept."""
    [(name, values)] = more.items()
    crossed = _Crossed(columns, name, values)
    if keep is None:
        return dict(crossed)
    places = np.flatnonzero(keep(crossed))
    crossed.rows, crossed.fresh = crossed.rows[places], crossed.fresh[places]
    return dict(crossed)


def _kept(columns: dict[str, Column], mask: Column) -> dict[str, Column]:
    places = np.flatnonzero(mask)
    return {name: column[places] for name, column in columns.items()}
