"""The time of a job's step under a strategy on a calibrated machine, by cause.

All ranks of a machine share its cores with whoever moves their messages, so nothing hides behind anything: a step is
the sum of computing, sending, updating and the engine's own overheads, and of a pipeline's bubbles, which are played.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shoal.comm.compress.traffic import pays
from shoal.estimate.codecs import codec_s, named
from shoal.estimate.estimate import Estimate
from shoal.estimate.pipeline.play import play_term
from shoal.estimate.steps.machine import Machine
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.operations import PRODUCTS, Operation
from shoal.strategy import Strategy, cp, none, pp, recompute, shared, tp

BUCKET_BYTES = 8 << 20
"""Gradients travel in buckets of so many bytes (`parallel/data.py`)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch through one part of the model on one rank."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    sent_s: float = 0.0
    """What tensor and context parallelism send, forward and backward."""
    kept_bytes: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.forward_s + other.forward_s, self.input_s + other.input_s, self.weight_s + other.weight_s,
            self.sent_s + other.sent_s, self.kept_bytes + other.kept_bytes,
        )  # fmt: skip

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


NOTHING_BYTES = 1024.0
"""Overheads were measured on messages of about this size: only what a larger one takes longer comes on top."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective inside a pass: `overhead` of the engine, and what its bytes take."""

    kind: str
    whole_bytes: float
    ranks: int
    overhead: str = ""
    times: float = 1.0
    """Part of the overhead that it pays."""
    copies: float = 0.0
    """How often what it moves is laid out anew, before it leaves or after it has come."""

    def seconds(self, machine: Machine) -> float:
        took_s = _seconds(machine, self.kind, self.whole_bytes, self.ranks)
        took_s += self.copies * machine.passes["copy"][0].at(self.whole_bytes / 4)
        if self.overhead not in machine.overheads:
            return took_s
        more_s = took_s - _seconds(machine, self.kind, NOTHING_BYTES, self.ranks)
        return self.times * machine.overheads[self.overhead] + max(0.0, more_s)


def price_step(model: JobModel, strategy: Strategy, machine: Machine) -> Estimate:
    """Seconds of a steady step, by cause."""
    micro = strategy.micro_batches
    samples = model.global_batch / (strategy.replicas * micro)
    by_piece = _passes(model, strategy, machine, samples)
    pipeline = strategy.term(pp)
    split = dict.fromkeys(("compute", "messages", "data", "codec", "bubble", "optimizer", "engine"), 0.0)
    whole = sum(by_piece.values(), Pass())
    kept_bytes = whole.kept_bytes
    if pipeline is None:
        split["compute"] = micro * (whole.forward_s + whole.backward_s)
        split["messages"] = micro * whole.sent_s
    else:
        kept_bytes = _pipelined(split, model, pipeline, machine, by_piece, samples)
    held = _held_bytes(model, strategy)
    split["data"] = sum(call.seconds(machine) for call in _data_calls(model, strategy, held))
    split["codec"] = _codec_s(model, strategy, machine, held)
    split["optimizer"] = _update_s(model, strategy, machine, held)
    over = machine.overheads
    if any(isinstance(level.via, shared) for level in strategy.dp_levels):
        split["data"] = over.get("shared_s", 0.0)
    split["engine"] = over.get("step_s", 0.0) + over.get("pass_s", 0.0) * (0 if pipeline else micro)
    memory = _states(model, strategy, held) | {"activations": round(kept_bytes)}
    return Estimate(
        strategy=str(strategy), world=strategy.world, step_s=sum(split.values()), step_split=split,
        memory_bytes=sum(memory.values()), memory_split=memory,
    )  # fmt: skip


def _states(model: JobModel, strategy: Strategy, held: float) -> dict[str, int]:
    """Parameters, gradients and the optimiser's state of a rank. In one memory each rank has its share of one copy."""
    levels = strategy.dp_levels
    zero = max((level.zero for level in levels), default=0)
    one_memory = any(isinstance(level.via, shared) for level in levels)
    shards = strategy.replicas
    state = held * (1 if model.optimizer == "SGD" else 2)
    return {
        "parameters": round(held / shards if zero == 3 or one_memory else held),
        "gradients": round(held / shards if zero >= 2 else held / 2 if one_memory else held),
        "optimizer": round(state / shards if zero >= 1 or one_memory else state),
    }


def _passes(model: JobModel, strategy: Strategy, machine: Machine, samples: float) -> dict[str, Pass]:
    """A micro-batch of so many samples, by piece of the model."""
    ratio = samples / model.samples
    local = list(_local(model, strategy))
    repeated = _repeated(model, strategy.modifier(recompute), local)
    found = {piece.name: Pass() for piece in model.pieces} | {"loss": Pass()}
    for number, operation in enumerate(local):
        each = operation.of_samples(ratio)
        forward_s = each.forward_s(machine)
        input_s, weight_s = each.backward_s(machine)
        if number in repeated:
            input_s += forward_s
        found[each.piece] += Pass(
            forward_s, input_s, weight_s, kept_bytes=0.0 if number in repeated else each.kept_bytes
        )
    for piece, call in _activation_calls(model, strategy, samples):
        found[piece] += Pass(sent_s=call.seconds(machine))
    if model.synchronised_norms and strategy.replicas > 1:
        for operation in model.operations:
            if operation.kind == "batch norm":
                found[operation.piece] += Pass(sent_s=_norm_s(operation.of_samples(ratio), machine))
    return found


def _norm_s(norm: Operation, machine: Machine) -> float:
    """What a batch norm over all replicas takes beyond one of its own: two meetings, and its gradient is put together
    from sums in two passes more."""
    return machine.overheads.get("norm_s", 0.0) + 2 * machine.passes["add"][0].at(norm.elements)


def _repeated(model: JobModel, again: recompute | None, local: Sequence[Operation]) -> set[int]:
    """Operations of blocks that backward computes a second time: all but products (selective), or all up to the last
    value that backward asks for. What ends a block, a product and a sum, is asked for by nobody inside it."""
    if again is None:
        return set()
    if again.kind == "selective":
        return {
            number for number, each in enumerate(local)
            if each.piece in model.blocks and each.kind not in ("linear", "convolution")
        }  # fmt: skip
    found = set()
    for block in model.blocks:
        inside = [number for number, each in enumerate(local) if each.piece == block]
        while inside and local[inside[-1]].kind == "add":
            inside.pop()
        found |= set(inside[:-1])
    return found


def _local(model: JobModel, strategy: Strategy) -> Iterator[Operation]:
    """A rank's own part of the operations."""
    tensor, context = strategy.term(tp), strategy.term(cp)
    local: Iterable[Operation] = model.operations
    if tensor is not None and tensor.n > 1:
        local = _in_tensor(model, tensor)
    for operation in local:
        if context is not None and context.n > 1 and (operation.piece in model.blocks or model.context_loss_cut):
            yield from _in_context(operation, context)
        else:
            yield operation


def _in_tensor(model: JobModel, tensor: tp) -> Iterator[Operation]:
    """Products by their cut sides; what lies between columns and rows by its elements. The rest every rank computes
    whole, unless the sequence is cut between regions."""
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


def _activation_calls(model: JobModel, strategy: Strategy, samples: float) -> Iterator[tuple[str, Call]]:
    """(piece, collective) of tensor and context parallelism, for one micro-batch."""
    tensor, context = strategy.term(tp), strategy.term(cp)
    stream = model.stream_bytes * samples / (context.n if context is not None else 1)
    if tensor is not None and tensor.n > 1:
        yield from _tensor_calls(model, tensor, stream, again=strategy.modifier(recompute) is not None)
    if context is not None and context.n > 1:
        for operation in model.operations:
            if operation.kind == "attention":
                sent = 4 * operation.count * samples / model.samples * operation.rows * operation.inner / context.n
                for call in _context_calls(context, sent):
                    yield operation.piece, call


def _tensor_calls(model: JobModel, tensor: tp, stream: float, *, again: bool) -> Iterator[tuple[str, Call]]:
    regions = round(model.tensor_inputs / max(1, len(model.blocks)))
    kinds = ["all_gather", "reduce_scatter"] * 2 if tensor.sequence else ["all_reduce"] * 2
    if again:
        kinds += kinds[: len(kinds) // 2]
    for block in model.blocks:
        for kind in kinds * regions:
            yield block, Call(kind, stream, tensor.n, "crossing_s", copies=1)
    if model.vocabulary_cut:
        yield model.pieces[0].name, Call("all_reduce", stream, tensor.n, "crossing_s", copies=1)
        yield model.pieces[-1].name, Call("all_reduce", stream, tensor.n, "crossing_s", copies=1)
    if model.loss_cut:
        for _ in range(2):
            yield model.pieces[-1].name, Call("all_reduce", NOTHING_BYTES, tensor.n, "crossing_s")


def _context_calls(context: cp, sent: float) -> Iterator[Call]:
    """Of one attention whose queries have `sent` bytes on a rank: keys and values as many each."""
    if context.method == "ulysses":
        for factor in (3, 1, 3, 1):
            yield Call("all_to_all", factor * sent, context.n, "crossing_s", copies=2)
        return
    hops = [2 * sent] * (3 * (context.n - 1))
    for size in hops:
        yield Call("send", size, context.n, "ring_s", 1 / len(hops), copies=1)


def _pipelined(
    split: dict[str, float], model: JobModel, pipeline: pp, machine: Machine, by_piece: dict[str, Pass], samples: float
) -> float:
    """Plays the schedule with the stages that the engine would cut; gives the bytes that the fullest rank keeps."""
    ranges = model.stages[pipeline.n * pipeline.chunks]
    stages = [sum((by_piece[piece.name] for piece in model.pieces[a:b]), Pass()) for a, b in ranges]
    stages[-1] += by_piece["loss"]
    action_s = machine.overheads.get("action_s", 0.0)
    forward = [each.forward_s + each.sent_s / 2 + action_s for each in stages]
    backward = [each.backward_s + each.sent_s / 2 + action_s for each in stages]
    crossing = [model.pieces[a].crossing_bytes * samples for a, _ in ranges[1:]]
    message_s = max((_seconds(machine, "send", size, 2) for size in crossing), default=0.0)
    played = play_term(
        pipeline, forward_s=forward, backward_s=backward, weight_s=[each.weight_s for each in stages],
        transfer_s=message_s,
    )  # fmt: skip
    micro = pipeline.micro
    split["compute"] = micro * sum(each.forward_s + each.backward_s for each in stages) / pipeline.n
    split["messages"] = micro * sum(each.sent_s for each in stages) / pipeline.n
    split["bubble"] = played.makespan_s - split["compute"] - split["messages"]
    largest = max(each.kept_bytes for each in stages)
    return largest * max(played.in_flight)


def _held_bytes(model: JobModel, strategy: Strategy) -> float:
    """Parameters of the fullest rank, before zero shards them."""
    tensor, pipeline = strategy.term(tp), strategy.term(pp)
    pieces = [piece.parameter_bytes for piece in model.pieces]
    if pipeline is not None and pipeline.n > 1:
        ranges = model.stages[pipeline.n * pipeline.chunks]
        per_stage = [sum(pieces[a:b]) for a, b in ranges]
        held = max(sum(per_stage[rank :: pipeline.n]) for rank in range(pipeline.n))
    else:
        held = sum(pieces)
    return held / (tensor.n if tensor is not None else 1)


def _data_calls(model: JobModel, strategy: Strategy, held: float) -> Iterator[Call]:
    """A step's gradients and parameters; `estimate/traffic.py` has the formulas."""
    levels = strategy.dp_levels
    context = strategy.term(cp)
    replicas = strategy.replicas * (context.n if context is not None else 1)
    if replicas == 1 or any(isinstance(level.via, shared) for level in levels):
        return
    if any(not isinstance(level.compress, none) for level in levels):
        return
    zero = max((level.zero for level in levels), default=0)
    micro = strategy.micro_batches
    pieces = max(1, round(held / BUCKET_BYTES)) if zero < 3 else max(1, len(model.blocks) + 1)
    each = held / pieces
    for _ in range(pieces):
        if zero == 0:
            yield Call("all_reduce", each, replicas)
            continue
        overhead = "gather_s" if zero == 3 else ""
        # Where memory is given back after every use it has to be found again.
        again = 1 if zero == 3 else 0
        for _ in range(micro if zero >= 2 else 1):
            yield Call("reduce_scatter", each, replicas, overhead, copies=again)
        for _ in range(2 * micro if zero == 3 else 1):
            yield Call("all_gather", each, replicas, overhead, copies=again)


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
    large = [shape for shape in model.shapes if pays(term, shape, 4, ranks=strategy.replicas)]
    return tensor_s * len(large) + element_s * sum(prod(shape) for shape in large) * held / model.parameter_bytes


def _update_s(model: JobModel, strategy: Strategy, machine: Machine, held: float) -> float:
    """The optimiser, on what a rank updates."""
    levels = strategy.dp_levels
    sharded = any(level.zero or isinstance(level.via, shared) for level in levels)
    elements = held / 4 / (strategy.replicas if sharded else 1)
    curve = machine.updates.get(model.optimizer) or machine.updates["AdamW"]
    # Clipping reads all gradients once and writes them once.
    return curve.at(elements) + 3 * 4 * elements / machine.memory_bytes_per_s


def _seconds(machine: Machine, kind: str, whole_bytes: float, ranks: int) -> float:
    """A collective; those of more ranks than were measured move (n - 1) / n of the bytes."""
    curve = machine.collectives[kind]
    share = (1 - 1 / ranks) / (1 - 1 / machine.ranks) if kind != "send" else 1.0
    return curve.at(whole_bytes * share)
