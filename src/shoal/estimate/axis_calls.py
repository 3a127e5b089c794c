"""What the axes that cut the model send in a step: tensor, context and pipeline parallelism, and a loss over the batch.

From the layout and one serial forward of a micro-batch (`layout/forward.py`), before anything runs. Where each tensor
crosses the ranks follows from the modules at the ends of a region; how large it is, and whether a gradient comes back,
from what these modules are given in the serial model. The collectives themselves are those of `tensor_traffic.py`,
`attention_traffic.py` and `pipeline_traffic.py`.

Recomputation repeats what lies before the last value that a block keeps for backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from shoal.estimate.attention_traffic import attention_calls
from shoal.estimate.held import Held
from shoal.estimate.pipeline_traffic import pipeline_traffic
from shoal.estimate.plane_traffic import plane_calls
from shoal.estimate.tensor_traffic import crossing_calls, gathered_logits_bytes
from shoal.estimate.traffic import NUMBER_BYTES, Call, Group
from shoal.layout.attention import AttentionCall
from shoal.layout.crossings import Crossing
from shoal.layout.forward import Flow, Forward, ModuleCall
from shoal.layout.spatial.grid import FULL, Grid
from shoal.layout.tensor.plan import Region
from shoal.strategy import cp, spatial
from shoal.strategy.schedule import stage_rank

Placed = tuple[str, Call]
"""The module at which it happens, and the collective."""


def axis_calls(held: Held, forwards: Sequence[Forward], *, total: int = 0, regions: bool = True) -> Iterator[Placed]:
    """The collectives of a step whose micro-batches are these, with the modules they belong to. `total`: samples of the
    global batch, where the loss is one of all of them. `regions`: with those of tensor parallelism's regions."""
    for forward in forwards:
        yield from _Step(held, forward, regions=regions).calls(total)
    yield from (("", call) for call in _pipeline(held, forwards))


def lies_between(held: Held, region: Region) -> str:
    """How the stream lies around a region: "whole" on every rank, or cut along the "sequence" or the "batch"."""
    column, stream = region.columns[0], held.shapes.stream
    if held.between != "sequence":
        return held.between
    inside = any(column == block or column.startswith(block + ".") for block in stream)
    return "sequence" if inside else "whole"


def sends_between(between: str) -> tuple[str, str]:
    """How tensors get into a region's columns, and out of its rows."""
    return ("copy_in", "sum_out") if between == "whole" else ("gather", "scatter_sum")


def gathered_at_entry(region: Region, between: str) -> bool:
    """Whether a region's input is gathered once for all columns, at the module around them."""
    return between != "whole" and region.entry is not None and region.entry not in region.columns


class _Step:
    """One micro-batch."""

    def __init__(self, held: Held, forward: Forward, *, regions: bool = True) -> None:
        self.held, self.forward, self.place = held, forward, held.placing
        self.regions = held.regions if regions else ()
        shapes = held.shapes
        self._spans = [
            (call.start, call.stop) for call in forward.calls if held.recomputes and call.path in shapes.blocks
        ]
        self._cut: tuple[float, float] | None = None
        if shapes.sequence is not None and self.place.context.ranks > 1:
            first, last = (forward.calls_of(path) for path in (shapes.sequence.blocks[0], shapes.sequence.blocks[-1]))
            end = float("inf")
            if shapes.sequence.whole_from:
                end = float(forward.calls_of(shapes.sequence.whole_from)[-1].start)
            elif shapes.sequence.gathers and "" not in shapes.sequence.views:
                end = float(last[-1].stop)
            self._cut = (first[0].start, end)

    def calls(self, total: int) -> Iterator[Placed]:
        tensor, context = self.place.tensor.group, self.place.context.group
        if tensor.ranks > 1:
            for at, path, crossing in sorted(self._crossings(), key=lambda row: row[0]):
                yield from _of(tensor, path, crossing, repeated=self._repeated(at))
        if context.ranks > 1:
            yield from self._attention()
        if self.place.planes.ranks > 1:
            yield from self._planes()
        if self.held.shapes.loss_over_batch and self.place.samples.ranks > 1 and self._ends_here():
            yield from self._outputs(total)

    def _planes(self) -> Iterator[Placed]:
        place, term = self.place.planes, self.held.strategy.term(spatial)
        assert term is not None
        for event in self.forward.planes:
            if self._in_stage(event.at):
                again = event.learns and self._repeated(event.at)
                one = event.of_channels(self.place.tensor.ranks) if self._in_channels(event.at) else event
                for call in plane_calls(one, place.group, term.grid, place.index, again=again):
                    yield event.module or "loss", call

    def _in_stage(self, at: float) -> bool:
        """Whether this rank runs what lies here, between pieces of the model too: a stage runs all code from the call
        of its first piece to that of the next stage's."""
        for stage in self.held.stages if self.held.term is not None else ():
            first, stop = (self._begins(piece) for piece in self.held.ranges[stage])
            if (first if stage else 0.0) <= at < stop:
                return True
        return self.held.term is None

    def _begins(self, piece: int) -> float:
        pieces = self.held.shapes.pieces
        if piece == len(pieces):
            return float("inf")
        return float(self.forward.calls_of(pieces[piece].path)[0].start)

    def _in_channels(self, at: float) -> bool:
        """Whether a region of channels is under way, in which tensors have part of them."""
        for region in self.regions if self.place.tensor.ranks > 1 else ():
            # What a column is given has all channels, so its own exchange comes before it counts.
            columns = [c.stop for c in self.forward.calls if c.path in region.columns and c.stop < at]
            rows = [c.stop for c in self.forward.calls if c.path in region.rows and c.stop < at]
            if columns and max(columns) > max(rows, default=-1):
                return True
        return False

    def _ends_here(self) -> bool:
        """Whether this rank computes the loss."""
        return self.held.term is None or len(self.held.ranges) - 1 in self.held.stages

    def _repeated(self, at: float) -> bool:
        """Whether recomputation comes to this place again."""
        for start, stop in self._spans:
            if start < at < stop:
                last = bisect_left(self.forward.saved, stop)
                return last > 0 and self.forward.saved[last - 1] > at
        return False

    def part(self, flow: Flow, at: float) -> Flow:
        """A tensor as this rank has it where the sequence or a plane is cut."""
        term = self.held.strategy.term(spatial)
        if flow.part != FULL and term is not None:
            grid = Grid(term.grid)
            shape = grid.local_shape(flow.shape, flow.part, grid.place(self.place.planes.index))
            return replace(flow, shape=shape)
        sequence = self.held.shapes.sequence
        if self._cut is None or sequence is None or not self._cut[0] < at < self._cut[1]:
            return flow
        place = next((n for n, size in enumerate(flow.shape) if size and size % sequence.length == 0), None)
        if place is None:
            return flow
        size = flow.shape[place] // self.place.context.ranks
        return Flow(
            flow.value, (*flow.shape[:place], size, *flow.shape[place + 1 :]), flow.itemsize, flow.floating, flow.learns
        )

    def _given(self, call: ModuleCall, *, dims: int, results: bool = False) -> Flow | None:
        """The first floating-point tensor of at least this number of dimensions."""
        flows = call.results if results else call.arguments
        return next((f for f in flows if f is not None and f.floating and len(f.shape) >= dims), None)

    def _working_bytes(self, flow: Flow, at: float) -> int:
        """As autocast gives it to a product."""
        part = self.part(flow, at)
        narrow = self.forward.autocast_itemsize
        return prod(part.shape) * (narrow if narrow and part.itemsize == 4 else part.itemsize)

    def _crossings(self) -> Iterator[tuple[float, str, Crossing]]:
        for region in self.regions:
            yield from self._region(region)
        yield from self._words()
        if self.held.between == "sequence":
            yield from self._stream()

    def _region(self, region: Region) -> Iterator[tuple[float, str, Crossing]]:
        between = lies_between(self.held, region)
        times = self.place.tensor.ranks if between == "batch" else 1
        into, out = sends_between(between)
        by_entry = gathered_at_entry(region, between)
        entered: set[int] = set()
        for at, call, role in self._events(region, by_entry=by_entry):
            if role == "row":
                entered = set()
                flow = self._given(call, dims=1, results=True)
                if flow is not None:
                    size = times * self.part(flow, at).bytes
                    yield at, call.path, Crossing(how=out, whole_bytes=size, gradient=flow.learns)
                continue
            if role == "entry":
                dims = 3 if between == "sequence" else 2
                flows = [self._given(call, dims=dims)]
            elif call.fused_attention:
                flows = [f for f in call.arguments[:3] if f is not None]
            else:
                flows = [self._given(call, dims=1)]
            for flow in flows:
                if flow is None or (role == "column" and (by_entry or flow.value in entered)):
                    continue
                entered.add(flow.value)
                size = times * self._working_bytes(flow, at)
                yield at, call.path, Crossing(how=into, whole_bytes=size, gradient=flow.learns)

    def _events(self, region: Region, *, by_entry: bool) -> list[tuple[float, ModuleCall, str]]:
        """When the region's modules are called, in order."""
        found: list[tuple[float, ModuleCall, str]] = []
        for call in self.forward.calls:
            if not self.held.runs(call.path):
                continue
            if call.path in region.columns:
                found.append((call.start, call, "column"))
                if call.fused_attention:
                    found.append((call.stop, call, "row"))
            elif call.path in region.rows:
                found.append((call.stop, call, "row"))
            if by_entry and call.path == region.entry:
                found.append((call.start, call, "entry"))
        return sorted(found, key=lambda row: row[0])

    def _words(self) -> Iterator[tuple[float, str, Crossing]]:
        words, ranks = self.held.vocabulary, self.place.tensor.ranks
        if words is None:
            return
        for call in self.forward.calls:
            if call.path in words.embeddings and self.held.runs(call.path):
                flow = self._given(call, dims=1, results=True)
                if flow is not None:
                    size = self.part(flow, call.stop).bytes
                    yield call.stop, call.path, Crossing(how="sum_out", whole_bytes=size, gradient=flow.learns)
            if call.path in words.heads and self.held.runs(call.path):
                flow, logits = self._given(call, dims=1), self._given(call, dims=1, results=True)
                if flow is None or logits is None:
                    continue
                size = self._working_bytes(flow, call.start)
                yield call.start, call.path, Crossing(how="copy_in", whole_bytes=size, gradient=flow.learns)
                if not words.loss_parallel:
                    part = self.part(logits, call.stop)
                    gathered = gathered_logits_bytes(
                        rows=prod(part.shape[:-1]), vocabulary=part.shape[-1], ranks=ranks, itemsize=part.itemsize
                    )
                    yield (
                        call.stop,
                        call.path,
                        Crossing(how="gather_whole", whole_bytes=gathered, gradient=logits.learns),
                    )
        if words.loss_parallel and words.heads and self._ends_here():
            for loss in self.forward.losses:
                rows = prod(self.part(loss.targets, loss.at).shape)
                for numbers in (1, loss.sums):
                    yield loss.at, "loss", Crossing(how="sum_out", whole_bytes=numbers * rows * loss.itemsize)

    def _stream(self) -> Iterator[tuple[float, str, Crossing]]:
        """With sequence=True: cut at the first block, gathered behind the last."""
        stream = self.held.shapes.stream
        for call in self.forward.calls:
            if call.path == stream[0] and self.held.runs(call.path):
                flow = self._given(call, dims=3)
                if flow is not None:
                    size = self.part(flow, call.start + 0.5).bytes
                    yield call.start - 0.5, call.path, Crossing(how="split", whole_bytes=size, gradient=flow.learns)
            if call.path == stream[-1] and self.held.runs(call.path):
                flow = self._given(call, dims=3, results=True)
                if flow is not None:
                    size = self.part(flow, call.stop - 0.5).bytes
                    yield call.stop + 0.5, call.path, Crossing(how="gather_whole", whole_bytes=size)

    def _attention(self) -> Iterator[Placed]:
        group, term, sequence = self.place.context.group, self.held.strategy.term(cp), self.held.shapes.sequence
        assert term is not None
        assert sequence is not None
        for seen in self.forward.attention:
            by_hand = any(seen.module == path or seen.module.startswith(f"{path}.") for path in sequence.views if path)
            if by_hand or not self.held.runs(seen.module):
                continue
            heads = self.place.tensor.ranks if self._in_heads(seen.at) else 1
            batch, num_heads, length, head_dim = seen.query.shape
            narrow = self.forward.autocast_itemsize  # Attention is one of the functions that autocast narrows.
            call = AttentionCall(
                batch=batch,
                heads=num_heads // heads,
                kv_heads=max(1, seen.key.shape[1] // heads),
                length=length // group.ranks,
                head_dim=head_dim,
                itemsize=narrow if narrow and seen.query.itemsize == 4 else seen.query.itemsize,
                value_dim=seen.value.shape[-1],
                trained=seen.query.learns,
            )
            repeated = [replace(call, again=True)] if seen.query.learns and self._repeated(seen.at) else []
            yield from ((seen.module, each) for each in attention_calls([call, *repeated], term.method, group))
        if sequence.gathers and "" not in sequence.views and self.held.runs(sequence.blocks[-1]):
            for done in self.forward.calls_of(sequence.blocks[-1]):
                flow = next((f for f in done.results if f is not None and len(f.shape) == 3), None)
                if flow is not None:
                    crossing = Crossing(how="gather", whole_bytes=flow.bytes, gradient=flow.learns)
                    yield from _of(group, done.path, crossing, repeated=False)

    def _in_heads(self, at: float) -> bool:
        """Whether a region of heads is under way."""
        for region in self.held.regions:
            if region.kind == "heads":
                events = [role for when, _, role in self._events(region, by_entry=False) if when < at]
                if events and events[-1] == "column":
                    return True
        return False

    def _outputs(self, total: int) -> Iterator[Placed]:
        """The model's outputs, gathered for a loss over the batch."""
        group = self.place.samples.group
        longest = -(-total // group.ranks)
        for flow in self.forward.outputs:
            if flow is not None and flow.shape:
                size = prod(flow.shape[1:]) * longest * group.ranks * flow.itemsize
                crossing = Crossing(how="gather_whole", whole_bytes=size, gradient=flow.learns)
                yield from _of(group, "loss", crossing, repeated=False)


def _of(group: Group, path: str, crossing: Crossing, *, repeated: bool) -> Iterator[Placed]:
    made = {crossing: 1}
    if repeated:
        made[Crossing(how=crossing.how, whole_bytes=crossing.whole_bytes, gradient=crossing.gradient, again=True)] = 1
    yield from ((path, call) for call in crossing_calls(group, made))


def _pipeline(held: Held, forwards: Sequence[Forward]) -> Iterator[Call]:
    term = held.term
    if term is None or term.n == 1:
        return
    steps = [_Step(held, forward) for forward in forwards]
    last = len(held.ranges) - 1
    before = {
        stage: [_wires(held, step, stage) for step in steps]
        for stage in held.stages
        if stage and _elsewhere(held, stage - 1, stage)
    }
    behind = {
        stage: [_wires(held, step, stage + 1) for step in steps]
        for stage in held.stages
        if stage < last and _elsewhere(held, stage + 1, stage)
    }
    numbers = 2 * NUMBER_BYTES if term.schedule == "pipedream" else 0
    group = held.placing.pipeline.group
    yield from pipeline_traffic(axis=group.axis, ranks=group.ranks, before=before, behind=behind, numbers_bytes=numbers)


def border_bytes(held: Held, forward: Forward) -> Iterator[int]:
    """What crosses the cut before each stage but the first, for one micro-batch."""
    step = _Step(held, forward)
    for stage in range(1, len(held.ranges)):
        yield sum(size for size, _ in _wires(held, step, stage))


def _elsewhere(held: Held, one: int, other: int) -> bool:
    term = held.term
    assert term is not None
    first, second = (stage_rank(stage, term.n, term.chunks, term.schedule) for stage in (one, other))
    return first != second


def _wires(held: Held, step: _Step, stage: int) -> list[tuple[int, bool]]:
    """What crosses the cut before a stage, for one micro-batch."""
    piece, pieces = held.ranges[stage][0], held.shapes.pieces
    stream = held.shapes.stream if held.between == "sequence" else ()
    found, streamed = [], False
    for wire in pieces[piece].wires:
        call = step.forward.calls_of(pieces[wire.piece].path)[wire.call]
        flow = (call.arguments if wire.is_argument else call.results)[wire.leaf]
        assert flow is not None
        size = step.part(flow, call.start if wire.is_argument else call.stop).bytes
        along = pieces[piece].path in stream[1:] and not streamed and flow.floating and len(flow.shape) >= 3
        if along:
            streamed = True
            size //= held.placing.tensor.ranks
        found.append((size, flow.learns and wire.learns))
    return found


def buffer_calls(held: Held) -> Iterator[Call]:
    """Buffers that replicas update from their own samples, as the job declares them."""
    here = {name: row for name, row in held.shapes.buffers.items() if held.holds_buffer(name)}
    summed = sum(numbers for numbers, how in here.values() if how in ("average", "sum"))
    copied = sum(numbers for numbers, how in here.values() if how == "broadcast")
    group = held.buffer_group()
    if summed:
        yield group.axis, "optimizer", "all_reduce", (1 + summed) * NUMBER_BYTES, group.ranks
    if copied:
        yield group.axis, "optimizer", "broadcast", copied * NUMBER_BYTES, group.ranks
