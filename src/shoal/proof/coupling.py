"""Whether the samples of a batch are independent of each other, found out by computing.

A strategy that splits a batch trains the model of one process only if the loss of the batch is the sum of the losses of
its parts, and the gradient and the count likewise. So one forward and backward of some samples is made at once and in
two parts of different size, in float64 and without dropout. Batch norm modules are left out (they use their running
statistics here): engines synchronise them by name. The answer names what is wrong, not only that something is.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.job import Batch, Job
from shoal.job.errors import JobError
from shoal.job.gradient_hooks import copied, hooks_of
from shoal.job.randomness import CannotPlace
from shoal.layout.held_outside import Outside
from shoal.layout.held_state import HeldNow, results_held
from shoal.parallel.result import COUNT_WITH_GRADIENT
from shoal.proof.counters import LATER, counters, numbers, set_counter
from shoal.proof.coupling_cause import EIGHTH, Kind, cause, not_linear
from shoal.proof.data_reads import same_values
from shoal.proof.fixed_norms import FixedStatistics, prepared
from shoal.proof.gate_model import perturb
from shoal.proof.sample_pass import (
    TOLERANCE,
    SamplePass,
    detached,
    difference,
    groups_differ,
    outputs_differ,
    sum_of,
)
from shoal.proof.undropped import Undropped, drawing_alike
from shoal.runtime.draws import serial_randomness
from shoal.runtime.float64 import KeepFloat64, to_float64
from shoal.strategy import Strategy

SAMPLES = 8
"""How many samples are tried first. If they are independent, more of the batch is tried, as time allows: hard-example
mining that keeps a minimum, for example, couples samples only above it."""
ORDERED = 32
"""Samples that are ordered by their loss, at most."""


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """What was found."""

    kind: Kind
    reason: str
    """One sentence with its numbers, and what would work; empty if nothing is wrong."""
    difference: float = 0.0
    """The largest relative difference between the batch and the sum of its parts."""
    state: tuple[str, ...] = ()
    """Buffers, attributes of modules and parameters that a forward changes, batch norm's aside: state that
    micro-batches advance once each."""
    count: float = 0.0  # Where a backward is not linear: by what gradients are divided.
    ordered: bool = False
    """Whether a batch computes something else when its samples are read in reverse (losses over pairs)."""

    @property
    def independent(self) -> bool:
        return self.kind == "none"


class SamplesCoupled(ValueError):
    """The strategy splits batches that must not be split."""


class CountLearns(ValueError):
    """The count depends on the parameters."""


def splits_batches(strategy: Strategy) -> bool:
    """Whether a rank ever computes on less than the global batch."""
    return strategy.replicas * strategy.micro_batches > 1


def refusal(found: Coupling, strategy: Strategy) -> str:
    """Why a job of which this was found cannot be trained under a strategy as in one process; empty if it can be."""
    splits = splits_batches(strategy)
    if found.kind == "count-gradient" or (found.kind == "backward" and (splits or found.count != 1)):
        return found.reason
    if found.kind in ("none", "unchecked") or not splits:
        return ""
    return f"{strategy} splits the batch, but {found.reason}"


def couples_samples(
    job: Job,
    *,
    model: nn.Module | None = None,
    samples: int | None = None,
    within_s: float = math.inf,
    strategy: Strategy | None = None,
) -> Coupling:
    """Finds out whether the samples of a job are independent of each other.

    Args:
        job: Its model, loss and first samples are used; its `loss_over` says what must be independent.
        model: The job's model, if it was built already; it is copied, not changed.
        samples: How many samples to try; all of the first batch unless given.
        within_s: Seconds that samples beyond the first 8 may take, by the time of those.
        strategy: Whose shares of a batch are tried too.

    Returns:
        What was found, with a sentence that names it. The random state is as it was before.
    """
    if job.loss_over == "micro-batch":
        return Coupling(kind="none", reason="")
    most = min(samples or job.global_batch, job.global_batch, len(job.train))
    num = min(most, SAMPLES)
    if num < 2:
        return Coupling(kind="unchecked", reason=f"{job.name!r} has one sample in a batch: there is nothing to split")
    if num > 3:
        num -= num % 2  # Losses over pairs of samples want even numbers.
    with drawing_alike():
        try:
            shares = strategy.replicas * strategy.micro_batches if strategy is not None else job.global_batch
            trial = _Trial(
                job,
                model,
                job.order().indices(0)[:num],
                share=-(-job.global_batch // shares),
                shared_norms=job.batch_norm == "sync" and (strategy is None or strategy.replicas > 1),
            )
            found = trial.found()
            if found.independent and not math.isfinite(within_s):  # Only a proof asks for it.
                found = replace(found, ordered=trial.is_ordered())
            if not found.independent or (strategy is not None and shares == 1):
                return found  # Where no batch is split, how it would be matters little.
            more = min(most, int(num * within_s / trial.seconds)) if math.isfinite(within_s) else most
            if more > SAMPLES:
                with suppress(MemoryError, RuntimeError):  # What the first samples show remains.
                    found = trial.of_more(job.order().indices(0)[: more - more % 2], found)
            if found.independent:
                found = trial.later(job.order().indices(0)[:num], found)
            return found
        except JobError:
            raise
        except Exception as error:  # Whatever the user's code raises says nothing about its samples.
            return Coupling(
                kind="unchecked",
                reason=f"{job.name!r}: whether its samples are independent was not checked, one forward and backward "
                f"in float64 raises {type(error).__name__}: {error}",
            )


class _Trial:
    """The passes over one set of samples, and what they say."""

    def __init__(
        self, job: Job, model: nn.Module | None, indices: np.ndarray, *, share: int, shared_norms: bool
    ) -> None:
        self.job, self.indices, self.share = job, indices, share
        self.outside = Outside(job)
        self.first = 0
        """Samples of the first of the two parts."""
        self.places_draws = False
        if model is None:
            torch.manual_seed(job.seed)
            model = job.model()
        known: dict[int, Any] = {id(result): result.detach().clone() for result in results_held(model)}
        self.norms = _norms(model) if shared_norms else []
        """Batch norms whose statistics replicas share."""
        self.start = prepared(copied(model, known))
        self.seconds = 0.0
        """That a batch at once and in parts takes."""

    @property
    def sizes(self) -> tuple[int, int]:
        return self.first, len(self.indices) - self.first

    def found(self) -> Coupling:
        batch, again = self._read(self.indices), self._read(self.indices)
        if not all(same_values(batch.get(name), again.get(name)) for name in batch.keys() | again.keys()):
            return self._found(
                "data",
                math.inf,
                "two reads of the same samples differ: batch(indices) must be a pure function of the "
                "indices; draw augmentations from a generator seeded by the index",
            )
        state = self._state()
        try:
            full, repeated = self._pass(batch), self._pass(batch, seed=2)
        except CountLearns:
            return self._found("count-gradient", math.inf, COUNT_WITH_GRADIENT)
        if not math.isfinite(full.loss):
            return self._found(
                "unchecked", math.inf, f"the loss of its first {len(self.indices)} samples is {full.loss}"
            )
        hooked = {name for name, param in self.start.named_parameters() if hooks_of(param)}
        if wrong := not_linear(full, self._pass(batch, scale=EIGHTH), hooked):
            return replace(self._found("backward", math.inf, wrong), count=full.count)
        gap = difference(full, repeated)
        if gap > TOLERANCE:
            # It draws numbers: then each sample draws its own, as in training.
            self.places_draws = True
            try:
                full, repeated = self._pass(batch), self._pass(batch, seed=2)
            except CannotPlace as error:
                return self._found("random", gap, f"no two passes over a batch are alike: {error}")
            gap = difference(full, repeated)
        if gap > TOLERANCE:
            return self._found(
                "random",
                gap,
                "the model or the loss draws random numbers other than dropout, so that no two passes "
                "over a batch are alike; only a strategy that leaves the batch in one piece can be compared",
            )
        return self._in_parts(full, batch, state)

    def of_more(self, indices: np.ndarray, found: Coupling) -> Coupling:
        """The same for more samples, after `found` was found for the first."""
        self.indices = indices
        batch = self._read(indices)
        full = self._pass(batch)
        if not math.isfinite(full.loss):
            return found
        return replace(self._in_parts(full, batch, found.state), ordered=found.ordered)

    def _in_parts(self, full: SamplePass, batch: Batch, state: tuple[str, ...]) -> Coupling:
        """Two samples and the rest; as the strategy shares them; the easier half and the harder: a loss that selects
        samples by their loss selects others in its parts."""
        num = len(self.indices)
        smallest = 2 if num > 3 else 1
        found = self._split(full, batch, state, smallest)
        if found.independent and smallest < self.share < num and self.share != smallest:
            found = self._split(full, batch, state, self.share)
        if found.independent and num > 3 and self.share < self.job.global_batch:
            given, self.indices = self.indices, self._by_loss()
            batch = self._read(self.indices)
            other = self._pass(batch)
            found = self._split(other, batch, state, num // 4 * 2)
            self.indices = given
        return found

    def is_ordered(self) -> bool:
        """Whether a batch computes something else when its samples are read in reverse, batch norm included."""
        forwards = range(len(self.indices))
        one, other = (
            self._pass(self._read(self.indices[list(samples)]), samples=samples, norms=True)
            for samples in (forwards, forwards[::-1])
        )
        return difference(one, other) > TOLERANCE

    def _by_loss(self) -> np.ndarray:
        """The samples from the smallest loss to the largest, each by itself (two by two where the loss is over pairs);
        after the first ones as they come."""
        for size in (1, 2):
            num = min(len(self.indices) // size, ORDERED) * size
            groups = [self.indices[at : at + size] for at in range(0, num, size)]
            losses = []
            try:
                for at, group in enumerate(groups):
                    found = self._pass(self._read(group), at=size * at, backward=False)
                    losses.append(found.loss)
            except Exception:  # The job's code may ask for more samples.
                continue
            ordered = [groups[place] for place in np.argsort(losses, kind="stable")]
            return np.concatenate([*ordered, self.indices[num:]])
        return self.indices

    def later(self, indices: np.ndarray, found: Coupling) -> Coupling:
        """The same where the model has counted further, after `found` was found at its start."""
        model = copied(self.start)
        before = numbers(model)
        with self.outside.kept(), KeepFloat64(), Undropped(), FixedStatistics():
            self.job.run_model(model, self._read(indices))
        names = counters(before, numbers(model))
        start, state = self.start, set(found.state)
        for value in LATER if names else ():
            self.indices, self.start = indices, copied(start)
            for name in names:
                set_counter(self.start, name, value)
            try:
                state |= set(self._state())
                batch = self._read(indices)
                full = self._pass(batch)
                there = self._split(full, batch, found.state, 2 if len(indices) > 3 else 1)
            except Exception:  # A count that the model may never reach.
                continue
            finally:
                self.start = start
            if not there.independent:
                return replace(there, reason=f"{there.reason} (found where {names[0]} is {value})")
        return replace(found, state=tuple(sorted(state)))

    def _split(self, full: SamplePass, batch: Batch, state: tuple[str, ...], first: int) -> Coupling:
        self.first = first
        started = time.perf_counter()
        pieces = zip(np.split(self.indices, [first]), (0, first), strict=True)
        one, two = (self._pass(self._read(part), at=at) for part, at in pieces)
        self.seconds = max(2 * (time.perf_counter() - started), 1e-6)
        if name := groups_differ(full, one, two):
            return self._found(
                "coupled",
                math.inf,
                f"the batch norm {name} normalises groups of samples that do not grow with the "
                "batch, so replicas, which share its statistics, would have other groups. Call it once for all "
                'samples, declare Job(batch_norm="local"), or take a strategy without replicas',
                state,
            )
        if self.job.loss_over == "batch":
            return self._of_outputs(full, one, two, state)
        gap = difference(full, sum_of(one, two))
        if gap <= TOLERANCE:
            return Coupling(kind="none", reason="", difference=gap, state=state)
        kind, reason = cause(full, one, two, sizes=self.sizes, cut=lambda: self._cut(batch))
        return self._found(kind, gap, reason, state if kind == "coupled" else ())

    def _cut(self, batch: Batch) -> SamplePass | None:
        """The sum of both parts, cut from the batch that was read at once; None where an entry is not one a sample."""
        if any(len(entry) != len(self.indices) for entry in batch.values()):
            return None
        cuts = (slice(self.first), slice(self.first, None))
        return sum_of(*(self._pass({k: v[s] for k, v in batch.items()}, at=s.start or 0) for s in cuts))

    def _of_outputs(self, full: SamplePass, one: SamplePass, two: SamplePass, state: tuple[str, ...]) -> Coupling:
        """A loss over the global batch: outputs must be those of each sample, so that they can be gathered."""
        wrong = outputs_differ(full.output, one.output, two.output)
        if not wrong:
            return Coupling(kind="none", reason="", state=state)
        return self._found(
            "coupled",
            math.inf,
            f'loss_over="batch" gathers the model\'s outputs, and they are not those of each '
            f"sample alone ({wrong}). Return tensors with the samples first, or numbers that do not depend on the "
            "batch, and leave what mixes samples to the loss",
            state,
        )

    def _found(self, kind: Kind, difference: float, reason: str, state: tuple[str, ...] = ()) -> Coupling:
        return Coupling(kind=kind, reason=f"job {self.job.name!r}: {reason}", difference=difference, state=state)

    def _read(self, indices: np.ndarray) -> Batch:
        return {name: to_float64(entry) for name, entry in self.job.train.batch(indices).items()}

    def _pass(
        self,
        batch: Batch,
        *,
        seed: int = 1,
        at: int = 0,
        samples: range | None = None,
        backward: bool = True,
        norms: bool = False,
        scale: float = 1.0,
    ) -> SamplePass:
        """On a copy of the model, so that no pass sees what another left behind. `at`: the place of its first sample
        among all, or `samples`: the places of all. `norms`: batch norm as in training. `scale`: of what part of the
        loss gradients are."""
        model = copied(self.start)
        if norms:
            model.train()
        drawn: Any = nullcontext()
        in_backward: Any = nullcontext()
        if self.places_draws:
            samples = samples or range(at, at + len(next(iter(batch.values()))))
            randomness = serial_randomness(self.job, model, torch.float64)
            drawn, in_backward = randomness.forward(samples, 0), randomness.backward()
        fixed: Any = nullcontext() if norms else FixedStatistics()
        kept = self.outside.kept()
        called: list[tuple[str, int]] = []
        for path in self.norms:
            model.get_submodule(path).register_forward_pre_hook(
                lambda _, given, path=path: called.append((path, given[0].numel()))
            )
        with drawing_alike(seed), torch.set_grad_enabled(backward), kept, KeepFloat64(), Undropped(), fixed, drawn:
            output = self.job.run_model(model, batch)
            loss, count = self.job.loss_of(output, batch)
            if isinstance(count, torch.Tensor) and count.requires_grad:
                raise CountLearns
            if loss.requires_grad and backward:
                with in_backward:
                    (loss * scale).backward()
        gradients = {name: param.grad.to_dense() for name, param in model.named_parameters() if param.grad is not None}
        return SamplePass(float(loss.detach()), float(count), gradients, detached(output), tuple(called))

    def _state(self) -> tuple[str, ...]:
        """What one forward changes in the model, batch norm's statistics aside, once its parameters have learned."""
        model = copied(self.start)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.requires_grad and param.numel():
                    perturb(name, param)  # A teacher that starts as its student would not move.
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        before = HeldNow(module for module in model.modules() if not isinstance(module, _BatchNorm))
        with self.outside.kept(), KeepFloat64(), Undropped(), FixedStatistics() as norms:
            self.job.run_model(model, self._read(self.indices))
        changed = {name for name, param in model.named_parameters() if not same_values(params.get(name), param)}
        changed |= set(before.changed_names(model))
        changed -= {name for name in changed if isinstance(model.get_submodule(name.rpartition(".")[0]), _BatchNorm)}
        if norms.asked:
            changed.add("statistics of batch_norm()")
        return tuple(sorted(changed))


def _norms(model: nn.Module) -> list[str]:
    """The batch norms that are in training mode while the model is."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return []
    named = copied(model).train().named_modules()
    return [path for path, module in named if path and isinstance(module, _BatchNorm) and module.training]
