"""The table of flat buffers of a rank, from the model's parameters and the strategy: what `traffic.predict` reads.

Nothing of a running engine is asked. Parameters are cut as the layout says, laid into buckets from the last to the
first (stage 3: one buffer for each block), aligned and padded as `parallel/flat.py` documents it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple, Protocol

from shoal.comm.compress import traffic as compressed
from shoal.comm.compress.sizes import matrix_of
from shoal.estimate.full_parameters import full_parameter_calls
from shoal.estimate.held import Held
from shoal.estimate.placing import ALONE, PredictedFamily, PredictedReplicas
from shoal.estimate.traffic import Buffer, Call, Compressed, Norm, PredictedSlot, ShardTable
from shoal.layout.forward import Forward, ParameterShape
from shoal.strategy import Strategy, pp
from shoal.strategy.terms.compress import CompressTerm, Transfer

BUCKET_BYTES = 8 << 20
"""Gradients travel in buckets of at most this size (`parallel/data.py`)."""
ALIGN = 16
"""Elements to which every parameter of a buffer is aligned (`parallel/flat.py`)."""
LONG_AFTER = 10**9
"""A step far from the start, when what a compression sends has settled."""


class Sends(Protocol):
    """The formulas of a compression, as `comm/compress/method.py` has them."""

    term: CompressTerm

    def pays(self, shape: Sequence[int], itemsize: int, *, ranks: int = 2) -> bool: ...

    def sent_bytes(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None: ...


@dataclass(slots=True)
class OfTerm:
    """Those of a term."""

    term: CompressTerm

    def pays(self, shape: Sequence[int], itemsize: int, *, ranks: int = 2) -> bool:
        return compressed.pays(self.term, shape, itemsize, ranks=ranks)

    def sent_bytes(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        return compressed.sent_bytes(self.term, shape, itemsize, ranks, step, rank=rank)


class Gathers(NamedTuple):
    """Stage 3: how many micro-batches of a step gather a block, in forward and in backward."""

    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class _TableStep:
    """What compression and the gathers of stage 3 depend on in addition to the strategy."""

    number: int
    unused: Collection[str]
    method: Sends | None
    gathers: Callable[[str], Gathers]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter as this rank holds it."""

    parameter: ParameterShape
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.parameter.itemsize


def shard_table(
    held: Held,
    strategy: Strategy,
    forward: Forward,
    *,
    calls: Sequence[Call] = (),
    step: int = LONG_AFTER,
    unused: Collection[str] = (),
    method: Sends | None = None,
    bucket_bytes: int | None = None,
    gathers: Callable[[str], Gathers] | None = None,
) -> ShardTable:
    """What the formulas need to know of the rank that holds this. `step`, `unused` and `method` matter to compression
    only: the step of training, parameters without a gradient in it, and formulas other than those of the term.
    `bucket_bytes`: if not BUCKET_BYTES. `gathers`: of a block, if not every micro-batch calls all blocks."""
    placing, term = held.placing, strategy.term(pp)
    if method is None and placing.compression is not None:
        method = OfTerm(placing.compression)
    every = Gathers(strategy.micro_batches, strategy.micro_batches)
    now = _TableStep(step, unused, method, gathers or (lambda block: every))
    unflushed = term is not None and term.schedule == "pipedream"
    names = [each.name for each in held.shapes.parameters if each.trains]
    if unflushed:
        names = [name for name in names if set(held.holders(name)) & set(held.stages)]
    buffers = tuple(_buffers(held, strategy, forward, now, bucket_bytes or BUCKET_BYTES))
    pieces = {name: size for buffer in buffers for name, size in buffer.pieces}
    return ShardTable(
        zero=placing.zero,
        one_memory=placing.one_memory,
        micro_batches=strategy.micro_batches,
        num_parameters=len(names),
        world=placing.island.group,
        norm=placing.parts_of_stage().group if unflushed else ALONE if placing.seats else placing.norm.group,
        stage=placing.colleagues().group if unflushed else None,
        samples=placing.samples.group,
        buffers=buffers,
        update=tuple(full_parameter_calls(held, pieces)),
        norms=tuple(_norms(held, forward)),
        calls=tuple(calls),
    )


def _norms(held: Held, forward: Forward) -> Iterator[Norm]:
    synchronised, place = held.shapes.synchronised_norms, held.placing
    for norm in forward.norms:
        group = place.plane_statistics(samples=synchronised).group if norm.of_planes else place.samples.group
        if held.runs(norm.module) and (norm.of_planes or synchronised) and group.ranks > 1:
            again = held.recomputes and norm.learns and held.shapes.in_block(norm.module)
            yield Norm(
                channels=norm.channels // held.channel_parts(norm.module),
                itemsize=norm.itemsize,
                recomputed=again,
                learns=norm.learns,
                group=group,
                module=norm.module,
            )


def _buffers(held: Held, strategy: Strategy, forward: Forward, now: _TableStep, bucket_bytes: int) -> Iterator[Buffer]:
    placing, micro = held.placing, strategy.micro_batches
    term = strategy.term(pp)
    pipelined, unflushed = term is not None, term is not None and term.schedule == "pipedream"
    entries = [_Entry(each, held.shape_of(each)) for each in held.own() if each.trains]
    reductions = micro if unflushed or (placing.zero >= 2 and not pipelined) else 1
    if placing.zero < 3:
        for group in _groups(held, entries[::-1], bucket_bytes):
            yield _buffer(held, group, now, reductions=reductions)
        return
    blocks = sorted({each.parameter.block for each in entries} - {-1})
    for block in [-1, *blocks]:
        inside = [each for each in entries if each.parameter.block == block]
        stays = block == -1 or _kept_whole(held.shapes.blocks[block], forward)
        is_last = not pipelined and block == blocks[-1] if blocks else False
        times = Gathers(micro, micro) if block == -1 else now.gathers(held.shapes.blocks[block])
        for group in _groups(held, inside, None):
            yield _buffer(
                held,
                group,
                now,
                reductions=reductions,
                forward_gathers=1 if pipelined and stays else times.forward,
                backward_gathers=0 if stays or (is_last and block != -1) else times.backward,
            )


def _kept_whole(block: str, forward: Forward) -> bool:
    """Whether a block's parameters stay gathered from forward to backward: it is used several times, or what it gives
    back hides its tensors."""
    calls = forward.calls_of(block)
    return len(calls) > 1 or any(call.opaque for call in calls)


def _groups(held: Held, entries: Sequence[_Entry], most_bytes: int | None) -> list[list[_Entry]]:
    """Consecutive parameters of one kind, up to `most_bytes` together (a larger one stands alone)."""
    open_groups: dict[tuple[str, PredictedFamily, int], list[_Entry]] = {}
    done: list[list[_Entry]] = []
    for entry in entries:
        name = entry.parameter.name
        key = (entry.parameter.dtype, held.family(entry.parameter), held.part(name))
        group = open_groups.setdefault(key, [])
        if group and most_bytes is not None and sum(each.bytes for each in group) + entry.bytes > most_bytes:
            done.append(group)
            group = open_groups[key] = []
        group.append(entry)
    return done + [group for group in open_groups.values() if group]


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _buffer(
    held: Held,
    group: Sequence[_Entry],
    now: _TableStep,
    *,
    reductions: int,
    forward_gathers: int = 0,
    backward_gathers: int = 0,
) -> Buffer:
    replicas = held.placing.replicas(held.family(group[0].parameter))
    itemsize = group[0].parameter.itemsize
    slots, start = [], 0
    for entry in sorted(group, key=lambda entry: entry.parameter.options):
        slots.append(PredictedSlot(entry.parameter.name, entry.shape, start))
        start = _up(start + entry.numel, ALIGN)
    parts = replicas.route.inside.ranks if replicas.route is not None else 1
    padded = _up(start, ALIGN * lcm(replicas.sharding.ranks, parts))
    size = padded // replicas.sharding.ranks
    low = replicas.sharding.index * size
    inside = ((slot.name, min(slot.stop, low + size) - max(slot.start, low)) for slot in slots)
    return Buffer(
        pieces=tuple((name, elements) for name, elements in inside if elements > 0),
        padded_bytes=padded * itemsize,
        replicas=replicas.everyone.group,
        sharding=replicas.sharding.group,
        copies=replicas.copies.group,
        compressed=_compressed(held, replicas, slots, padded, itemsize, now),
        reductions=reductions,
        forward_gathers=forward_gathers,
        backward_gathers=backward_gathers,
        itemsize=itemsize,
        slots=tuple(slots),
        shard=replicas.sharding.index,
    )


def _compressed(
    held: Held, replicas: PredictedReplicas, slots: Sequence[PredictedSlot], padded: int, itemsize: int, now: _TableStep
) -> Compressed | None:
    route, method = replicas.route, now.method
    if route is None or method is None:
        return None
    low, high = 0, padded
    if not route.whole:
        over = replicas.sharding if held.placing.zero else route.inside
        size = padded // over.ranks
        low, high = over.index * size, (over.index + 1) * size
    transfers = compressed_transfers(
        method,
        slots,
        (low, high),
        itemsize,
        ranks=route.between.ranks,
        rank=route.between.index,
        step=now.number,
        unused=now.unused,
    )
    return Compressed(
        inside=route.inside.group,
        between=route.between.group,
        outside=route.outside.group,
        whole=route.whole,
        transfers=tuple(transfers),
    )


def compressed_transfers(
    method: Sends,
    slots: Sequence[PredictedSlot],
    part: tuple[int, int],
    itemsize: int,
    *,
    ranks: int,
    rank: int,
    step: int,
    unused: Collection[str] = (),
) -> list[Transfer]:
    """The collectives that sum a part of a buffer, compressed: the payloads, and what is not worth compressing."""
    low, high = part
    working = max(itemsize, 4)
    reductions, dense = [], 0
    for slot in slots:
        first, last = max(slot.start, low) - slot.start, min(slot.stop, high) - slot.start
        if first >= last:
            continue
        body = compressible(
            lambda shape: method.pays(shape, working, ranks=ranks), method.term.whole_rows, slot.shape, first, last
        )
        dense += last - first - (body[1] - body[0] if body is not None else 0)
        if body is not None and slot.name not in unused:
            reductions.append(method.sent_bytes(body[2], working, ranks, step, rank=rank))
    transfers = compressed.joined(calls for calls in reductions if calls is not None)
    if dense:
        transfers.append(Transfer("all_reduce", dense * itemsize))
    return transfers


def compressible(
    pays: Callable[[Sequence[int]], bool], in_rows: bool, shape: tuple[int, ...], low: int, high: int
) -> tuple[int, int, tuple[int, ...]] | None:
    """What of a range of a parameter is compressed, and in which shape; None where it does not pay."""
    if not pays(shape):
        return None
    body = _body(in_rows, shape, low, high)
    return body if body[0] < body[1] and pays(body[2]) else None


def _body(in_rows: bool, shape: tuple[int, ...], low: int, high: int) -> tuple[int, int, tuple[int, ...]]:
    """What of a range of a parameter is compressed, and in which shape: some need full rows of a matrix."""
    if (low, high) == (0, prod(shape)):
        return low, high, shape
    if not in_rows:
        return low, high, (1, high - low)
    _, columns = matrix_of(shape)
    first, last = -(-low // columns), high // columns
    return first * columns, last * columns, (max(0, last - first), columns)
