"""The serial run that proofs compare with: the model that one process would have trained, in plain PyTorch.

Nothing here is shared with what is judged, but the job and the rule for random numbers (`runtime/draws.py`): the model
is built and seeded, batches are taken in the documented order, and the optimiser steps on full parameters, each in a
few lines of their own. A global batch is one forward and one backward. It is cut only where the contract says "per
micro-batch", in the pieces that the caller names.

It also watches each element's gradient: where the true gradient is zero (the bias of an attention key, a bias before
batch norm) what is left is rounding, and Adam divides rounding by its epsilon. Such elements are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.job import Job, JobError
from shoal.job.kept import state_of
from shoal.job.probe_run import needs_closure
from shoal.job.random_optimizer import UpdateDraws, draws_numbers
from shoal.proof.islands import Islands, after_step, agree
from shoal.proof.rounding import Disturbed, move_by_rounding
from shoal.runtime.draws import serial_randomness, serial_update

ROUNDING = 1e-12
"""A gradient that never exceeds this fraction of the largest gradient in the model is taken for rounding of a zero."""


@dataclass
class Reference:
    """Where the serial run ended, and how it got there."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]
    """Parameter -> state key -> tensor of the parameter's shape."""
    buffers: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """As the optimiser got them, summed over the steps as `summed` does: what a small learning rate would hide."""
    frozen: dict[str, torch.Tensor]
    """Parameters that the optimiser does not step; a forward may change them all the same."""
    rounding: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> mask of the elements whose true gradient is zero."""


FADING = 0.9
"""A step's weight in the sum of gradients is this, for every step that follows: no two steps can cancel for long."""


def summed(so_far: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds a step's gradient to the sum that a proof compares."""
    so_far.mul_(FADING).add_(gradient)


def train_serially(
    job: Job,
    *,
    steps: int,
    micro_batches: int = 1,
    parts: int = 1,
    dtype: torch.dtype | None = torch.float64,
    conditions: Callable[[], AbstractContextManager[None]] = nullcontext,
    updates: Sequence[int] | None = None,
    disturbed: Disturbed | None = None,
    islands: Islands | None = None,
) -> Reference:
    """Trains a job for some steps.

    Args:
        job: What to train.
        steps: Optimiser steps; global batches.
        micro_batches: Pieces of a batch that are computed one after the other, their gradients summed; more than 1
            only where the contract is per micro-batch.
        parts: Pieces of each micro-batch, likewise.
        dtype: torch.float64, or None to compute in the model's own types.
        conditions: A context for forward, loss, backward and step.
        updates: For pipelines without flush, which update after every micro-batch: how many micro-batches have
            reported their loss after 0, 1, 2, ... steps.
        disturbed: How to round differently.
        islands: Where islands step by themselves: all of them are simulated, one after the other. Losses, gradients and
            optimiser state are then the first one's, parameters and buffers the mean of all.
    """
    copies = [_Copy(job, dtype, conditions, disturbed) for _ in range(islands.num if islands else 1)]
    if islands is not None:
        for copy in copies:
            copy.kept = islands.begin([param.detach() for param in copy.named.values()])
    first = copies[0]
    counter = 0
    sums: list[tuple[float, float]] = []
    """Of the losses that lead to one update each, and how many they are."""
    per_step = 1 if updates is None else micro_batches
    if islands is not None and islands.logs is not None:
        sums = _replayed(job, copies, islands, separate=micro_batches > 1, parts=parts)
    for update in range(steps * per_step if not sums else 0):
        step, micro = divmod(update, per_step)
        indices = _batch_at(job, counter)
        positions = np.arange(len(indices))
        if islands is not None:
            shares = [islands.share(positions, n, separate=micro_batches > 1, parts=parts) for n in range(len(copies))]
        else:
            shares = [
                [part for piece in np.array_split(positions, micro_batches) for part in np.array_split(piece, parts)]
            ]
        if updates is not None:
            shares = [shares[0][micro * parts : (micro + 1) * parts]]
        started = counter
        if micro == per_step - 1:
            counter += len(indices)
        together = islands is not None and step < islands.start
        own = islands is not None and not together
        others = [[piece for other in shares if other is not mine for piece in other] for mine in shares]
        found = [
            copy.update(
                step, indices, pieces, started, skip_empty=own or updates is not None, others=rest if together else ()
            )
            for copy, pieces, rest in zip(copies, shares, others, strict=True)
        ]
        sums.append(found[0])
        if islands is not None:
            after_step(step, copies, islands)
    if islands is not None:
        agree(copies, islands)
    ends = range(len(sums) + 1) if updates is None else updates
    reported = [sums[start:stop] for start, stop in pairwise(ends)]
    return reference_of(first, _means(reported))


def _means(steps: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """The mean loss of each step; of one that counts nothing that of the step before."""
    found: list[float] = []
    for rows in steps:
        count = sum(count for _, count in rows)
        found.append(sum(total for total, _ in rows) / count if count else found[-1] if found else 0.0)
    return found


def reference_of(first: _Copy, losses: list[float]) -> Reference:
    """Where a model stands now."""
    named, optimizer, largest = first.named, first.optimizer, first.largest
    top = max((float(peak.max()) for peak in largest.values() if peak.numel()), default=0.0)
    keys = {key for param in named.values() for key in _elementwise_state(optimizer, param)}
    return Reference(
        losses=losses,
        parameters={name: param.detach() for name, param in named.items()},
        state={name: _elementwise_state(optimizer, param, keys) for name, param in named.items()},
        buffers=dict(first.model.named_buffers()),
        gradients={name: gradient.detach() for name, gradient in first.gradients.items()},
        frozen={name: param.detach() for name, param in first.model.named_parameters() if name not in named},
        rounding={name: (peak > 0) & (peak <= ROUNDING * top) for name, peak in largest.items()},
    )


def _replayed(
    job: Job, copies: Sequence[_Copy], islands: Islands, *, separate: bool, parts: int
) -> list[tuple[float, float]]:
    """The first island's losses and counts, where the order of updates and exchanges is that of a log."""
    starts = [0]

    def update(island: int, step: int, share: int) -> tuple[float, float]:
        while len(starts) <= step:
            starts.append(starts[-1] + len(_batch_at(job, starts[-1])))
        indices = _batch_at(job, starts[step])
        pieces = islands.share(np.arange(len(indices)), share, separate=separate, parts=parts)
        return copies[island].update(step, indices, pieces, starts[step], skip_empty=True)

    assert islands.logs is not None
    assert islands.replay is not None
    return islands.replay(islands.logs, copies, update)


class _Copy:
    """A model with its optimiser, trained by one process."""

    def __init__(self, job: Job, dtype: torch.dtype | None, conditions: Any, disturbed: Disturbed | None) -> None:
        self.job, self.dtype, self.conditions, self.disturbed = job, dtype, conditions, disturbed
        torch.manual_seed(job.seed)
        self.model = job.model()
        if dtype is not None:
            self.model._apply(_double)
        self.model.train()
        self.drawn = UpdateDraws(job.seed) if draws_numbers(job.optimizer) else None
        self.optimizer = job.optimizer(_groups(job, self.model))
        self.base = [_copied(group.get("lr", 0.0)) for group in self.optimizer.param_groups]
        self.factor = 1.0
        self.named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        # The only code that engines run too; what learns is settled before it.
        self.randomness = serial_randomness(job, self.model, dtype)
        self.largest = {name: torch.zeros_like(param.abs()) for name, param in self.named.items()}
        self.gradients = {name: torch.zeros_like(param) for name, param in self.named.items()}
        self.noise = torch.Generator().manual_seed(disturbed.seed) if disturbed is not None else None
        self.counted = 0.0
        """Samples or tokens since the last exchange."""
        self.own_count = 0.0
        """Those of the last update, without what other copies had."""
        self.kept: Any = {}
        """Of a scheme that ties islands together."""

    def update(
        self,
        step: int,
        indices: np.ndarray,
        pieces: Sequence[np.ndarray],
        started: int,
        *,
        skip_empty: bool,
        others: Sequence[np.ndarray] = (),
    ) -> tuple[float, float]:
        """One update from the mean loss of these pieces of a batch; the sum of the losses and their count. It also
        learns from `others`, which are another copy's: they leave no trace in buffers."""
        job, optimizer = self.job, self.optimizer
        if self.noise is not None:
            move_by_rounding(self.named.values(), self.noise)
        for group, lr in zip(optimizer.param_groups, self.base, strict=True):
            if job.lr_factor(step) != self.factor:
                # A tensor keeps its own precision, as PyTorch's schedulers leave it.
                group["lr"] = lr * job.lr_factor(step)
        self.factor = job.lr_factor(step)
        if needs_closure(optimizer):
            return self._with_closure(lambda: self._compute(indices, pieces, started, others))
        total, count = self._compute(indices, pieces, started, others)
        if not count and skip_empty:
            return total, count
        if not count:
            raise JobError(
                f"job {job.name!r}: the loss of step {step + 1} counts nothing (its count is 0), so its mean is not a "
                "number; take larger batches, or samples of which some count"
            )
        self.counted += self.own_count
        _sum_up(self.named, self.gradients)
        with self.conditions(), serial_update(self.drawn, self.named, started):
            optimizer.step()
        return total, count

    def _with_closure(self, compute: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        evaluated: list[tuple[float, float]] = []

        def closure() -> torch.Tensor:
            with torch.enable_grad():
                total, count = compute()
            if not evaluated:
                _sum_up(self.named, self.gradients)
            evaluated.append((total, count))
            return torch.tensor(total / count if count else float("nan"), dtype=torch.float64)

        with self.conditions():
            self.optimizer.step(closure)  # type: ignore[arg-type]
        self.counted += self.own_count
        return evaluated[0]

    def begin_anew(self) -> None:
        """The optimiser forgets all earlier steps."""
        self.optimizer, self.factor = self.job.optimizer(_groups(self.job, self.model)), 1.0

    def _compute(
        self, indices: np.ndarray, pieces: Sequence[np.ndarray], started: int, others: Sequence[np.ndarray] = ()
    ) -> tuple[float, float]:
        """The sum of the losses and their count; gradients become those of the mean, clipped."""
        job, total, count, foreign = self.job, 0.0, 0.0, 0.0
        self.optimizer.zero_grad(set_to_none=True)
        buffers = [buffer.clone() for buffer in self.model.buffers()] if others else []
        for at, positions in enumerate((*others, *pieces)):
            if others and at == len(others):
                foreign = count
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            if not len(positions):
                continue
            ordered = positions[::-1] if self.disturbed is not None and self.disturbed.reverse else positions
            batch = job.train.batch(indices[ordered])
            if self.dtype is not None:
                batch = {name: _double(entry) for name, entry in batch.items()}
            placed = self.randomness.forward([started + int(position) for position in ordered], started)
            with self.conditions():
                with placed:
                    loss, counted = job.loss_of(job.run_model(self.model, batch), batch)
                if loss.requires_grad:
                    with self.randomness.backward():
                        loss.backward()
            total, count = total + float(loss.detach()), count + float(counted)
        self.own_count = count - foreign
        if count:
            _average(self.named, self.largest, count)
            if job.clip is not None:
                nn.utils.clip_grad_norm_(self.named.values(), job.clip)
        return total, count


def _copied(rate: Any) -> Any:
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)


def _average(named: Mapping[str, nn.Parameter], largest: Mapping[str, torch.Tensor], count: float) -> None:
    """Gradients of a sum become those of the mean; `largest` keeps each element's peak."""
    with torch.no_grad():
        for name, param in named.items():
            if param.grad is not None:
                param.grad.div_(count)
                torch.maximum(largest[name], param.grad.to_dense().abs(), out=largest[name])


def _sum_up(named: Mapping[str, nn.Parameter], gradients: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in named.items():
            summed(gradients[name], torch.zeros_like(param) if param.grad is None else param.grad.to_dense())


def _double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _groups(job: Job, model: nn.Module) -> list[dict[str, Any]]:
    """Trainable parameters, grouped by equal options in the order of their first appearance."""
    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            options = job.options(name, param)
            members = next((params for known, params in groups if known == options), None)
            if members is None:
                groups.append((options, members := []))
            members.append(param)
    return [{"params": params, **options} for options, params in groups]


def _batch_at(job: Job, counter: int) -> np.ndarray:
    """The samples of the global batch that starts at a counter, by the documented rule: epoch e visits the samples in
    the order PCG64(SeedSequence([seed, e])).permutation; epochs follow each other, and a batch goes on into the next
    one ("wrap") or ends with its own ("short"). It has the size that it has grown to at its first sample."""
    num = len(job.train)
    stop = counter + ([job.global_batch] + [size for start, size in job.growth if start <= counter])[-1]
    if job.last_batch == "short":
        stop = min(stop, (counter // num + 1) * num)
    epochs = range(counter // num, (stop - 1) // num + 1)
    orders = [
        np.random.Generator(np.random.PCG64(np.random.SeedSequence([job.seed, e]))).permutation(num) for e in epochs
    ]
    first = epochs[0] * num
    return np.concatenate(orders)[counter - first : stop - first]


def _elementwise_state(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, keys: set[str] | None = None
) -> dict[str, torch.Tensor]:
    """State with a value for each element. Of a scalar parameter only `keys` separate it from numbers like the step."""
    state = state_of(optimizer, param)
    return {
        k: v.to_dense()
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and v.shape == param.shape and (v.dim() > 0 or (keys and k in keys))
    }
