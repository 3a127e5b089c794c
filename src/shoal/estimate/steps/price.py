"""The time of a job's step under a strategy on a calibrated machine, by cause.

All ranks of a machine share its cores with whoever moves their messages, so nothing hides behind anything: a step is
the sum of computing, sending, updating and the engine's own overheads, and of a pipeline's bubbles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shoal.comm.compress.traffic import pays
from shoal.estimate.codecs import codec_s, named
from shoal.estimate.estimate import Estimate
from shoal.estimate.held import Held
from shoal.estimate.pipeline.simulate import most_kept
from shoal.estimate.pipeline.spans import Numbers, Pipelines, spans_s
from shoal.estimate.step_calls import StepCalls, step_calls
from shoal.estimate.steps.machine import Machine
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.operations import PRODUCTS, Operation
from shoal.estimate.steps.timed_calls import activation_calls, collective_s, data_calls, exchange_s
from shoal.strategy import Strategy, cp, none, pp, recompute, shared, spatial, tp
from shoal.strategy.schedule import actions


@dataclass(frozen=True, slots=True)
class StagePass:
    """One micro-batch through one part of the model on one rank."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    forward_sent_s: float = 0.0
    backward_sent_s: float = 0.0
    """What the axes that cut the model send, and batch norms over all replicas."""
    kept_bytes: float = 0.0

    def __add__(self, other: StagePass) -> StagePass:
        return StagePass(
            self.forward_s + other.forward_s,
            self.input_s + other.input_s,
            self.weight_s + other.weight_s,
            self.forward_sent_s + other.forward_sent_s,
            self.backward_sent_s + other.backward_sent_s,
            self.kept_bytes + other.kept_bytes,
        )

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    @property
    def sent_s(self) -> float:
        return self.forward_sent_s + self.backward_sent_s


def price_step(model: JobModel, strategy: Strategy, machine: Machine) -> Estimate:
    """Seconds of a steady step, by cause. Islands pay for their exchange in equal parts in the steps of a period."""
    model = _of_planes(model, strategy)
    micro = strategy.micro_batches
    samples = model.global_batch / (strategy.replicas * micro)
    ranks = [
        step_calls(model.shapes, model.forward, strategy, global_batch=model.global_batch, rank=rank)
        for rank in representatives(strategy)
    ]
    by_piece = _passes(model, strategy, machine, samples, ranks)
    pipeline = strategy.term(pp)
    split = dict.fromkeys(("compute", "messages", "data", "averaging", "codec", "bubble", "optimizer", "engine"), 0.0)
    total = sum(by_piece.values(), StagePass())
    kept_bytes = total.kept_bytes
    if pipeline is None:
        split["compute"] = micro * (total.forward_s + total.backward_s)
        split["messages"] = micro * total.sent_s
    else:
        kept_bytes = _pipelined(split, model, pipeline, machine, by_piece, ranks[0])
    held = max(held_bytes(each.held) for each in ranks)
    split["data"] = max(sum(call.seconds(machine) for call in data_calls(each)) for each in ranks)
    split["averaging"] = max(exchange_s(each, machine) for each in ranks)
    split["codec"] = _codec_s(model, strategy, machine, held)
    shards = shards_of(strategy)
    split["optimizer"] = _update_s(model, machine, held / shards)
    over = machine.overheads
    split["engine"] = over.get("step_s", 0.0) + over.get("pass_s", 0.0) * (0 if pipeline else micro)
    memory = states(model, strategy, held, shards) | {"activations": round(kept_bytes)}
    return Estimate(
        strategy=str(strategy),
        world=strategy.world,
        step_s=sum(split.values()),
        step_split=split,
        memory_bytes=sum(memory.values()),
        memory_split=memory,
    )


def _of_planes(model: JobModel, strategy: Strategy) -> JobModel:
    """The model with the traffic of planes, where they are cut."""
    term = strategy.term(spatial)
    if term is None or term.n == 1:
        return model
    if term.grid not in model.planes:
        rows, columns = term.grid
        raise ValueError(f"{term}: {model.name} was not looked at with its planes cut into {rows} x {columns}")
    return replace(model, forward=model.planes[term.grid].forward)


def representatives(strategy: Strategy) -> list[int]:
    """One rank of each stage of the pipeline, the first along all other axes: those hold most where parts differ."""
    place, found = 1, [0]
    for axis in reversed(strategy.axes):
        if isinstance(axis.term, pp):
            found = [index * place for index in range(axis.size)]
        place *= axis.size
    return found


def shards_of(strategy: Strategy) -> int:
    """Ranks among which optimiser state is split: those of the level that shards, not of all levels."""
    return max((level.n for level in strategy.dp_levels if level.zero or isinstance(level.via, shared)), default=1)


def states(model: JobModel, strategy: Strategy, held: float, shards: int) -> dict[str, int]:
    """Parameters, gradients and the optimiser's state of a rank. In one memory each rank has its share of one copy."""
    levels = strategy.dp_levels
    zero = max((level.zero for level in levels), default=0)
    one_memory = any(isinstance(level.via, shared) for level in levels)
    state = held * (1 if model.optimizer == "SGD" else 2)
    return {
        "parameters": round(held / shards if zero == 3 or one_memory else held),
        "gradients": round(held / shards if zero >= 2 else held / 2 if one_memory else held),
        "optimizer": round(state / shards),
    }


def _passes(
    model: JobModel, strategy: Strategy, machine: Machine, samples: float, ranks: Sequence[StepCalls]
) -> dict[str, StagePass]:
    """A micro-batch of this number of samples, by piece of the model."""
    ratio = samples / model.samples
    local = list(local_operations(model, strategy))
    repeated = repeated_operations(model, strategy.term(recompute), local)
    found = {piece.name: StagePass() for piece in model.pieces} | {"loss": StagePass()}
    for number, operation in enumerate(local):
        each = operation.of_samples(ratio)
        forward_s = each.forward_s(machine)
        input_s, weight_s = each.backward_s(machine)
        if number in repeated:
            input_s += forward_s
        found[each.piece] += StagePass(
            forward_s, input_s, weight_s, kept_bytes=0.0 if number in repeated else each.kept_bytes
        )
    for rank in ranks:
        for times, piece, call in activation_calls(model, rank):
            took_s = times * call.seconds(machine) / strategy.micro_batches
            forward = call.phase == "forward"
            sent = (took_s, 0.0) if forward else (0.0, took_s)
            found[piece] += StagePass(forward_sent_s=sent[0], backward_sent_s=sent[1])
    place = ranks[0].held.placing
    if model.synchronised_norms and place.samples.ranks * place.planes.ranks > 1:
        for operation in model.operations:
            if operation.kind == "batch norm":
                # A gradient of a batch norm over all replicas is put together from sums in two passes more.
                more_s = 2 * machine.passes["add"][0].at(operation.of_samples(ratio).elements)
                found[operation.piece] += StagePass(input_s=more_s)
    return found


def repeated_operations(model: JobModel, again: recompute | None, local: Sequence[Operation]) -> set[int]:
    """Operations of blocks that backward computes a second time: all but products (selective), or all up to the last
    value that backward asks for. What ends a block, a product and a sum, is read by nothing inside it."""
    if again is None:
        return set()
    if again.kind == "selective":
        return {
            number
            for number, each in enumerate(local)
            if each.piece in model.blocks and each.kind not in ("linear", "convolution")
        }
    found = set()
    for block in model.blocks:
        inside = [number for number, each in enumerate(local) if each.piece == block]
        while inside and local[inside[-1]].kind == "add":
            inside.pop()
        found |= set(inside[:-1])
    return found


def local_operations(model: JobModel, strategy: Strategy) -> Iterator[Operation]:
    """A rank's own part of the operations."""
    tensor, context = strategy.term(tp), strategy.term(cp)
    local: Iterable[Operation] = model.operations
    if tensor is not None and tensor.n > 1:
        local = _in_tensor(model, tensor)
    planes = strategy.term(spatial)
    parts = model.planes[planes.grid].modules if planes is not None and planes.n > 1 else frozenset()
    for operation in local:
        if planes is not None and ("" if operation.piece == "loss" else operation.name) in parts:
            yield operation.cut(planes.n, along="rows")
        elif context is not None and context.n > 1 and (operation.piece in model.blocks or model.context_loss_cut):
            yield from _in_context(operation, context)
        else:
            yield operation


def _in_tensor(model: JobModel, tensor: tp) -> Iterator[Operation]:
    """Products by their cut sides; what lies between columns and rows by its elements. Every rank computes all of the
    rest, unless the sequence is cut between regions."""
    inside = False
    for operation in model.operations:
        side = model.tensor_cut.get(operation.name)
        inside = (inside or side == "columns") and side != "inner"
        in_block = operation.piece in model.blocks
        cut = (in_block and (inside or tensor.sequence)) or (operation.piece == "loss" and model.loss_cut)
        if side is not None and operation.kind in PRODUCTS:
            yield operation.cut(tensor.n, along=side)
        else:
            yield operation.cut(tensor.n, along="rows") if cut else operation


def _in_context(operation: Operation, context: cp) -> Iterator[Operation]:
    n = context.n
    if operation.kind != "attention" or context.method == "ulysses":
        yield operation.cut(n, along="rows")
        return
    part = replace(operation, count=operation.count, rows=operation.rows / n, columns=operation.columns / n)
    for hop in range(n):
        yield part
        if hop:
            # What this hop's keys gave is merged with what came before: three passes over the output.
            merged = operation.count * operation.rows / n * operation.inner
            for _ in range(3):
                yield Operation(kind="add", name=operation.name, piece=operation.piece, elements=merged)


def _pipelined(
    split: dict[str, float],
    model: JobModel,
    pipeline: pp,
    machine: Machine,
    by_piece: dict[str, StagePass],
    calls: StepCalls,
) -> float:
    """Times the schedule of the stages that the engine would cut; gives the bytes that the fullest rank keeps."""
    ranges = model.stages[pipeline.n * pipeline.chunks]
    stages = [sum((by_piece[piece.name] for piece in model.pieces[a:b]), StagePass()) for a, b in ranges]
    stages[-1] += by_piece["loss"]
    action_s = machine.overheads.get("action_s", 0.0)
    forward = [each.forward_s + each.forward_sent_s + action_s for each in stages]
    backward = [each.backward_s + each.backward_sent_s + action_s for each in stages]
    message_s = max((collective_s(machine, "send", size, 2) for size in calls.border_bytes), default=0.0)
    micro = pipeline.micro
    [span_s] = spans_s(
        [
            Pipelines(
                schedule=pipeline.schedule,
                ranks=pipeline.n,
                chunks=pipeline.chunks,
                micro=micro,
                forward_s=_column(forward),
                backward_s=_column(backward),
                weight_s=_column([each.weight_s for each in stages]),
                message_s=np.array([message_s]),
            )
        ]
    )
    split["compute"] = micro * sum(each.forward_s + each.backward_s for each in stages) / pipeline.n
    split["messages"] = micro * sum(each.sent_s for each in stages) / pipeline.n
    split["bubble"] = float(span_s[0]) - split["compute"] - split["messages"]
    largest = max(each.kept_bytes for each in stages)
    return largest * max(most_kept(order) for order in actions(pipeline))


def _column(values: Sequence[float]) -> Numbers:
    return np.array(values)[:, None]


def held_bytes(held: Held) -> float:
    """Parameters of a rank, before zero shards them."""
    return float(sum(prod(held.shape_of(each)) * each.itemsize for each in held.own()))


def _codec_s(model: JobModel, strategy: Strategy, machine: Machine, held: float) -> float:
    """Compressing and adding up payloads."""
    term = next((level.compress for level in strategy.dp_levels if not isinstance(level.compress, none)), None)
    if term is None:
        return 0.0
    measured = named(machine.codecs, term)
    if measured is None:
        found: float = codec_s(term, held / 4, ranks=strategy.replicas, stream_bytes_per_s=machine.memory_bytes_per_s)
        return found
    tensor_s, element_s = measured
    shapes = [each.shape for each in model.shapes.parameters]
    large = [shape for shape in shapes if pays(term, shape, 4, ranks=strategy.replicas)]
    return tensor_s * len(large) + element_s * sum(prod(shape) for shape in large) * held / model.parameter_bytes


def _update_s(model: JobModel, machine: Machine, updated_bytes: float) -> float:
    """The optimiser, on what a rank updates."""
    elements = updated_bytes / 4
    curve = machine.updates.get(model.optimizer) or machine.updates["AdamW"]
    # Clipping reads all gradients once and writes them once.
    return curve.at(elements) + 3 * 4 * elements / machine.memory_bytes_per_s
