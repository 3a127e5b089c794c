"""What can be checked of a training loop that Shoal does not own (`own_loop.py`): state of replicas, counts, the loss.

In a job a start-up check and the gate compute steps before training. Here the loop belongs to the user, so checks look
at what passes through the engine: buffers that replicas have changed differently (after steps 1, 2, 4, 8, ...), and
counts of the first step. Whether the loss of a batch is the sum of the losses of its parts shows only where the loss
can be called: `check_split`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from shoal.comm.json_exchange import exchange
from shoal.comm.ledger import BOOK
from shoal.comm.mesh import Members
from shoal.layout.experts.rehearsal import rehearsing
from shoal.parallel.engine import Engine
from shoal.proof.coupling import SamplesCoupled
from shoal.proof.fixed_norms import FixedStatistics, fix_norms
from shoal.proof.undropped import Undropped, drawing_alike, without_dropout

LossOf = Callable[..., tuple[torch.Tensor, Any]]

ROUNDINGS = 64
"""Buffers of replicas may differ by this number of roundings: hosts of different kinds sum in different orders."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference of a loss from the sum of its parts, by its precision."""
COARSEST = 3e-2
UNCHECKED = (
    "shoal.engine does not see how the loss is computed. Not checked: that it is a sum over samples with their number "
    "as the count, and that no sample's loss depends on others (contrastive losses do). engine.check(loss_of, *batch) "
    "checks it; a Job is checked and proven (shoal verify)"
)


class ReplicasDiffer(ValueError):
    """Replicas hold different state where one process has one."""


class ReplicaState:
    """Buffers, frozen parameters and numbers that modules hold, compared across replicas."""

    def __init__(self, model: nn.Module, everyone: Members, *, declared: Collection[str]) -> None:
        """`declared`: buffers for which it is known what replicas do with them; those of batch norm are too."""
        self.model, self.everyone = model, everyone
        normed = [f"{path}." if path else "" for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
        self.known = {*declared, *(n for n, _ in model.named_buffers() if any(map(n.startswith, normed)))}
        self.begin()

    def begin(self) -> None:
        """Notes what there is; replicas hold the same now."""
        self._before = {name: (value, _version(value)) for name, value in self._held().items()}

    def compare(self, step: int) -> str:
        """What replicas hold differently although it is no buffer, as a warning. Collective.

        Raises:
            ReplicasDiffer: It is a buffer or a frozen parameter.
        """
        now = self._held()
        changed = {
            name: list(getattr(value, "shape", ()))
            for name, value in now.items()
            if name in self._before and self._is_changed(name, value)
        }
        rows = [row["changed"] for row in exchange({"changed": changed})]
        buffers = dict(self.model.named_buffers())
        frozen = dict(self.model.named_parameters())
        warning = ""
        for name in sorted({name for row in rows for name in row}):
            same_shape = len({tuple(row[name]) for row in rows if name in row}) == 1
            difference = self._difference(now[name]) if same_shape and all(name in row for row in rows) else None
            if difference is not None and not difference:
                continue
            by = "" if difference is None else f", by {difference:.1e} of its size"
            if name in buffers:
                raise ReplicasDiffer(
                    f"after step {step} the buffer {name} differs between replicas{by}: each updates it from its own "
                    "share of the batch. Declare what replicas do with it: "
                    f"shoal.engine(..., buffers={{{name!r}: 'average'}}), or 'sum' (counts), 'broadcast' (the first "
                    "replica's), 'local' (each its own)"
                )
            if name in frozen:
                raise ReplicasDiffer(
                    f"after step {step} the frozen parameter {name} differs between replicas{by}: each updates it from "
                    "its own share of the batch. Register it as a buffer (register_buffer) and declare "
                    f"shoal.engine(..., buffers={{{name!r}: 'average'}})"
                )
            warning = warning or (
                f"after step {step}, {name} differs between replicas{by}. It is no buffer, so each replica keeps its "
                "own; if the model computes with it, register it as a buffer (register_buffer) and declare "
                "shoal.engine(..., buffers=...)"
            )
        return warning

    def _held(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        for path, module in self.model.named_modules():
            own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
            numbers = {k: v for k, v in own.items() if isinstance(v, (torch.Tensor, float)) and k != "training"}
            found |= {f"{path}.{name}" if path else name: value for name, value in numbers.items()}
        found |= {name: buffer for name, buffer in self.model.named_buffers() if buffer.numel()}
        return {name: value for name, value in found.items() if name not in self.known}

    def _is_changed(self, name: str, value: Any) -> bool:
        before, version = self._before[name]
        if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
            return bool(type(value) is type(before) and value != before)
        # What a forward leaves behind for others to read has the shape of the batch, or was not there before.
        return value.shape == before.shape and (value is not before or _version(value) != version)

    def _difference(self, value: Any) -> float:
        """The largest difference between replicas by the size of the value; 0 if it is no more than rounding."""
        values = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        dtype = values.dtype
        values = torch.view_as_real(values) if values.is_complex() else values
        with BOOK.during("setup"):
            ends = torch.stack([values.double(), -values.double()])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.everyone.group)
        most, least = ends[0], -ends[1]
        size = float(ends[ends.isfinite()].abs().max()) if ends.isfinite().any() else 0.0
        difference = float(torch.where(most == least, 0.0, most - least).abs().max())
        rounding = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
        return 0.0 if difference <= ROUNDINGS * rounding * size else difference / (size or 1.0)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def doubtful_counts(rows: list[dict[str, Any]]) -> str:
    """What is doubtful in the counts of one step, each rank's row being the samples that its model was called on and
    the counts of its micro-batches; empty if nothing is."""
    samples, counts = [row["samples"] for row in rows], [sum(row["counts"]) for row in rows]
    right = "engine.backward(loss_sum, count) takes the sum of the losses and the number that it is a sum over"
    if all(count == 1 for row in rows for count in row["counts"]) and max(samples) > 1:
        return (
            f"every loss came with a count of 1, and the model saw {max(samples)} samples on a rank: a mean with a "
            f"count of 1 weighs parts of different size alike, a sum is divided by the number of ranks; {right}"
        )
    if len(set(samples)) > 1 and len(set(counts)) == 1 and min(samples) > 0:
        return (
            f"all ranks gave the count {counts[0]:g}, but their models saw different numbers of samples "
            f"({min(samples)} to {max(samples)}); {right}, of this rank's share only"
        )
    if len(rows) > 1 and set(counts) == {float(sum(samples))}:
        return (
            f"every rank gave the count {counts[0]:g}, which is the number of samples of all ranks together; {right}, "
            "of this rank's share only"
        )
    return ""


def check_split(model: nn.Module, loss_of: LossOf, batch: tuple[Any, ...]) -> None:
    """One forward of a batch at once and in two parts: losses and counts must add up. Collective; leaves no trace.

    Raises:
        SamplesCoupled: They do not; the text says what is wrong on which rank.
    """
    num = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    wrong = "" if num > 1 else f"the batch to check has {num} samples, and two are needed to split it"
    first = 2 if num > 3 else 1

    def passed(low: int, high: int) -> tuple[float, float, torch.dtype]:
        part = tree_map(lambda leaf: leaf[low:high] if _has_samples(leaf, num) else leaf, batch)
        with rehearsing(model), drawing_alike(), _as_if_alone(model):
            loss, count = loss_of(*part)
        if loss.numel() != 1:
            raise SamplesCoupled(f"the loss has shape {list(loss.shape)}; return its sum")
        return float(loss), float(count), loss.dtype

    if not wrong:
        (full, all_of, dtype), (one, some, _), (two, rest, _) = passed(0, num), passed(0, first), passed(first, num)
        wrong = _what_is_wrong((full, one, two), (all_of, some, rest), (num, first), TOLERANCES.get(dtype, COARSEST))
    rows = exchange({"wrong": wrong})
    for rank, row in enumerate(rows):
        if row["wrong"]:
            raise SamplesCoupled(f"rank {rank}: {row['wrong']}")


def _what_is_wrong(
    losses: tuple[float, float, float], counts: tuple[float, float, float], sizes: tuple[int, int], tolerance: float
) -> str:
    def near(a: float, b: float, size: float) -> bool:
        return abs(a - b) <= tolerance * size

    (full, one, two), (num, first) = losses, sizes
    size = max(map(abs, losses)) or 1.0
    of = f"of {num} samples it is {{:.6g}}, of {first} and {num - first} of them {{:.6g}} and {{:.6g}}"
    right = "Pass the sum of the losses and the number of samples or tokens that it is a sum over"
    adds_up, counts_add_up = near(full, one + two, size), near(counts[0], counts[1] + counts[2], max(counts) or 1.0)
    if adds_up and counts_add_up:
        return ""
    if adds_up:
        return f"the count is wrong: {of.format(*counts)}, which does not add up. {right}"
    if near(full, (first * one + (num - first) * two) / num, size):
        return f"the loss is a mean, not a sum: {of.format(*losses)}. {right}"
    return (
        f"the samples of a batch are coupled, by model or loss, which does not add up: {of.format(*losses)}. "
        'Ranks and micro-batches would train another model. Train a Job with loss_over="batch" if the loss is one over '
        "the batch, or use nn.BatchNorm for batch statistics"
    )


def _has_samples(leaf: Any, num: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == num


@contextmanager
def _as_if_alone(model: nn.Module) -> Iterator[None]:
    """Nothing is dropped, and batch norm, which replicas synchronise, uses fixed statistics. Within `rehearsing`, which
    puts rates and statistics back."""
    training = [(module, module.training) for module in model.modules()]
    without_dropout(model).train()
    fix_norms(model)
    try:
        with torch.no_grad(), Undropped(), FixedStatistics():
            yield
    finally:
        for module, was in training:
            module.training = was


def mean_loss(engine: Engine, loss_of: LossOf, batch: tuple[Any, ...]) -> float:
    """The mean loss of a batch whose parts the ranks compute, in evaluation mode. Collective."""
    first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    mine = engine.share(len(first))
    empty = mine.start == mine.stop  # Such a rank computes on one sample, since a forward is a collective under zero=3.
    part = slice(0, 1) if empty else mine
    was_training = engine.model.training
    engine.model.eval()
    try:
        with torch.no_grad(), BOOK.during("evaluate"):
            total, count = loss_of(*tree_map(lambda leaf: _rows(leaf, len(first), part), batch))
            sums = torch.tensor([float(total), float(count)], dtype=torch.float64, device=engine.device)
            if empty:
                sums.zero_()
            if engine.placement.world.group is not None:
                dist.all_reduce(sums, group=engine.placement.world.group)
    finally:
        engine.owner.release()
        engine.model.train(was_training)
    return float(sums[0] / sums[1])


def _rows(leaf: Any, samples: int, part: slice) -> Any:
    split = isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == samples
    return leaf[part] if split else leaf
