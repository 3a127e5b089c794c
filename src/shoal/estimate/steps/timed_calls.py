"""The collectives of a step with what they cost on a calibrated machine: the calls of `step_calls`, none added or left
out, each with the overhead of the engine that comes with it.

Overheads were measured on steps of next to nothing, their messages included (`calibration/overheads.py`); so of a
call with an overhead only what its bytes take longer comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2

from shoal.estimate.step_calls import StepCalls
from shoal.estimate.steps.machine import Machine
from shoal.estimate.steps.model import JobModel
from shoal.estimate.traffic import (
    Call,
    batch_norm_calls,
    gradient_calls,
    loss_calls,
    norm_calls,
    parameter_calls,
    update_calls,
)

NOTHING_BYTES = 1024.0
"""Overheads were measured on messages of about this size."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One collective, and the overhead that comes with it."""

    call: Call
    """As the ledger has it."""
    overhead: str = ""
    times: float = 1.0
    """Part of the overhead that it pays; 0: it is paid by another one, or once a step."""
    copies: float = 0.0
    """How often what it moves is laid out anew, before it leaves or after it has arrived."""

    @property
    def phase(self) -> str:
        return self.call[1]

    def seconds(self, machine: Machine) -> float:
        _, _, kind, payload_bytes, ranks = self.call
        took_s = collective_s(machine, kind, payload_bytes, ranks)
        took_s += self.copies * machine.passes["copy"][0].at(payload_bytes / 4)
        if self.overhead not in machine.overheads:
            return took_s
        more_s = took_s - collective_s(machine, kind, NOTHING_BYTES, ranks)
        return self.times * machine.overheads[self.overhead] + max(0.0, more_s)


def collective_s(machine: Machine, kind: str, payload_bytes: float, ranks: int) -> float:
    """A collective; those of more ranks than were measured move (n - 1) / n of the bytes."""
    if kind in ("recv", "barrier"):
        return 0.0  # The send is timed, and a barrier is all overhead.
    if kind == "broadcast":
        return ceil(log2(ranks)) * machine.collectives["send"].at(payload_bytes)
    curve = machine.collectives[kind]
    share = (1 - 1 / ranks) / (1 - 1 / machine.ranks) if kind != "send" else 1.0
    return curve.at(payload_bytes * share)


def data_calls(step: StepCalls) -> Iterator[TimedCall]:
    """Gradients and parameters of data parallelism, what steers the step, and buffers that the job declares."""
    table, compression = step.table, step.held.placing.compression
    if compression is not None and compression.sized_by_data:
        raise ValueError(
            f"{compression}: how many elements it sends depends on the gradients, so its step cannot be estimated; "
            "use a compression that sends a given part, such as topk(0.01)"
        )
    for call in _sent((*loss_calls(table), *norm_calls(table))):
        yield TimedCall(call, "step_s", 0.0)
    for call in _sent((*gradient_calls(table), *parameter_calls(table))):
        if call[2] == "barrier":
            yield TimedCall(call, "shared_s", 0.5)  # One before the update and one after it.
        elif table.zero == 3 and call[2] in ("reduce_scatter", "all_gather"):
            # Where memory is given back after every use it has to be found again.
            yield TimedCall(call, "gather_s", copies=1)
        else:
            yield TimedCall(call)
    for call in _sent(tuple(update_calls(table))):
        yield TimedCall(call, copies=2)  # Pieces are joined before they leave, and full parameters of what arrives.
    for call in _sent(step.buffers):
        yield TimedCall(call)


def exchange_s(step: StepCalls, machine: Machine) -> float:
    """A step's part of the exchange of islands: all-reduces, and two passes over what is weighted before them."""
    found_s = sum(TimedCall(call, copies=1).seconds(machine) for call in _sent(step.exchange))
    return found_s / step.period


def _sent(calls: tuple[Call, ...]) -> Iterator[Call]:
    return (call for call in calls if call[-1] > 1)


def activation_calls(model: JobModel, step: StepCalls) -> Iterator[tuple[int, str, TimedCall]]:
    """(how often in a step, piece of the model, call) of the axes that cut the model, and of batch norms over all
    replicas. What crosses the cuts of a pipeline is timed with its schedule instead."""
    pieces = [piece.name for piece in model.pieces]

    def piece_of(path: str) -> str:
        return next((name for name in pieces if path == name or path.startswith(name + ".")), pieces[-1])

    for times, placed in step.activations:
        for path, call in placed:
            if path and call[-1] > 1:
                piece = "loss" if path == "loss" else piece_of(path)
                yield times, piece, _timed(step, call)
    for norm, call in zip(*_by_norm(step), strict=True):
        yield 1, piece_of(norm), TimedCall(call, "norm_s", 0.5)


def _by_norm(step: StepCalls) -> tuple[list[str], list[Call]]:
    """The calls of batch norms, each with its module: the table has them norm by norm."""
    calls = [call for call in batch_norm_calls(step.table) if call[-1] > 1]
    if not step.table.norms or not calls:
        return [], []
    found: list[str] = []
    for norm in step.table.norms:
        found += [norm.module] * (1 + norm.learns + norm.recomputed) * step.table.micro_batches
    return found, calls


def _timed(step: StepCalls, call: Call) -> TimedCall:
    axis, _, kind, _, ranks = call
    if axis == step.held.placing.context.group.axis and kind in ("send", "recv"):
        return TimedCall(call, "ring_s", 1 / (3 * (ranks - 1)) if kind == "send" else 0.0, copies=kind == "send")
    if kind in ("send", "recv"):
        return TimedCall(call, "crossing_s", 1.0 if kind == "send" else 0.0, copies=kind == "send")
    return TimedCall(call, "crossing_s", copies=2 if kind == "all_to_all" else 1)
