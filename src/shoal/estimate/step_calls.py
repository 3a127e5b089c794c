"""The one source of what a strategy sends in a step: every collective of one rank, before anything runs. Islands
(`sync=local(h)`) exchange after every `period` steps (`outer_calls.py`).

The ledger's prediction adds them up (`traffic.predict`), `steps/price.py` times them, and what a run counts is compared
with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.common.numbers import even_part
from shoal.estimate.axis_calls import Placed, axis_calls, border_bytes, buffer_calls
from shoal.estimate.expert_traffic import even_routing, expert_traffic
from shoal.estimate.held import Held
from shoal.estimate.outer_calls import period, period_calls
from shoal.estimate.shard_table import shard_table
from shoal.estimate.traffic import Call, ShardTable
from shoal.layout.forward import ExpertShape, Forward, JobShapes
from shoal.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCalls:
    """What one rank sends in a step."""

    held: Held
    table: ShardTable
    """Of data parallelism, with all other calls."""
    activations: tuple[tuple[int, tuple[Placed, ...]], ...]
    """Kinds of micro-batches: how many there are, and what each sends along the axes that cut the model."""
    buffers: tuple[Call, ...]
    """Of buffers that the job declares."""
    border_bytes: tuple[int, ...]
    """What crosses the cut before each stage of a pipeline but the first, for the largest micro-batch."""
    period: int
    """Steps from one exchange of islands to the next; 1 where all ranks step together."""
    exchange: tuple[Call, ...]
    """What islands send in the steps of a period."""


def micro_sizes(samples: int, micro: int, ranks: int, index: int) -> list[int]:
    """Samples of each micro-batch on one of the ranks that split it (`job/order.py`: the larger parts come first). A
    rank without any computes on one that does not count."""
    found = []
    for which in range(micro):
        start, stop = even_part(samples, micro, which)
        first, last = even_part(stop - start, ranks, index)
        found.append(max(1, last - first))
    return found


def step_calls(
    shapes: JobShapes, forward: Forward, strategy: Strategy, *, global_batch: int, rank: int = 0
) -> StepCalls:
    """Of a steady step. `forward` may be of any number of samples; experts are taken to be chosen evenly."""
    held = Held(shapes, strategy, rank)
    samples = held.placing.split
    sizes = micro_sizes(global_batch, strategy.micro_batches, samples.ranks, samples.index)
    kinds = []
    for size in dict.fromkeys(sizes):
        one = forward.of_samples(size)
        placed = (*axis_calls(held, [one], total=global_batch), *_experts(held, forward, size))
        kinds.append((sizes.count(size), placed))
    buffers = tuple(buffer_calls(held))
    calls = [call for times, placed in kinds for _, call in placed for _ in range(times)]
    largest = forward.of_samples(max(sizes))
    table = shard_table(held, strategy, largest, calls=[*calls, *buffers])
    return StepCalls(
        held=held,
        table=table,
        activations=tuple(kinds),
        buffers=buffers,
        border_bytes=tuple(border_bytes(held, largest)),
        period=period(strategy),
        exchange=tuple(period_calls(held, table)),
    )


def _experts(held: Held, forward: Forward, samples: int) -> Iterator[Placed]:
    group = held.placing.experts.group
    if group.ranks == 1:
        return
    for layer in held.shapes.experts:
        if not held.runs(layer.owner):
            continue
        for rows, itemsize in _rows(layer, forward):
            recomputed = held.recomputes and held.shapes.in_block(layer.owner)
            runs = even_routing(
                ranks=group.ranks,
                experts=layer.count,
                tokens=rows * samples // forward.samples,
                slots=1,
                width=layer.width,
                itemsize=itemsize,
                axis=group.axis,
                form="stacked" if layer.stacked else "listed",
                recomputed=recomputed,
            )
            yield from ((layer.owner, call) for call in expert_traffic(runs))


def _rows(layer: ExpertShape, forward: Forward) -> Iterator[tuple[int, int]]:
    """Of each run of a layer: rows that go to experts, and bytes of a number."""
    for call in forward.calls_of(layer.owner):
        if layer.stacked:
            flows = [flow for flow in call.arguments if flow is not None and len(flow.shape) == 2]
            chosen = next(flow for flow in flows if not flow.floating)
            hidden = next(flow for flow in flows if flow.floating and flow.shape[1] == layer.width)
            yield chosen.shape[0] * chosen.shape[1], hidden.itemsize
            continue
        paths = {f"{layer.path}.{key}" if layer.path else key for key in layer.members}
        rows, itemsize = 0, 4
        for inner in forward.calls:
            if inner.path in paths and call.start < inner.start < call.stop:
                flow = next((f for f in inner.arguments if f is not None), None)
                if flow is not None:
                    rows += flow.bytes // flow.itemsize // layer.width
                    itemsize = flow.itemsize
        yield rows, itemsize
