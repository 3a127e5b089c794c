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
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.job import Batch, Job
from shoal.job.errors import JobError
from shoal.job.gradient_hooks import copied, hooks_of
from shoal.job.randomness import CannotPlace
from shoal.layout.held_outside import Outside
from shoal.layout.held_state import HeldNow, results_held
from shoal.parallel.result import COUNT_WITH_GRADIENT
from shoal.proof.counters import LATER, counters, numbers, set_counter
from shoal.proof.undropped import Undropped, without_dropout
from shoal.runtime.draws import serial_randomness
from shoal.runtime.float64 import KeepFloat64, model_in_float64, to_float64
from shoal.strategy import Strategy

Kind = Literal[
    "none", "mean", "count", "count-gradient", "backward", "coupled", "padding", "data", "random", "unchecked"
]  # fmt: skip
"""none: samples are independent. mean, count: the loss is no sum, or the count is not what it is a sum over.
count-gradient: the count depends on the parameters. backward: gradients are not proportional to the loss. coupled:
samples see each other in the model or in the loss.
padding: the numbers depend on which samples are read together. data: two reads of the same samples differ.
random: the model draws numbers that are not dropout. unchecked: it could not be computed."""

TOLERANCE = 1e-8
"""Largest relative difference of independent samples. They measure 1e-13; a coupling of interest 1e-6 and more."""
SMALLEST = 1e-4
"""A gradient is compared by the size of its tensor's largest element, or by this part of the model's largest."""
SAMPLES = 8
"""How many samples are tried first. If they are independent, more of the batch is tried, as time allows: hard-example
mining that keeps a minimum, for example, couples samples only above it."""
ORDERED = 32
"""Samples that are ordered by their loss, at most."""
EIGHTH = 0.125
"""A power of two: linear functions of it round alike."""
START = 0.02
"""Standard deviation of what parameters that start at zero are set to: behind a zero nothing could be seen."""


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
    ordered: bool = False
    """Whether a batch computes something else when its samples are read in reverse (losses over pairs)."""

    @property
    def independent(self) -> bool:
        return self.kind == "none"


class SamplesCoupled(ValueError):
    """The strategy splits batches that must not be split."""


@dataclass(frozen=True)
class _Pass:
    """One forward and backward."""

    loss: float
    count: float
    gradients: dict[str, torch.Tensor]
    output: Any


def splits_batches(strategy: Strategy) -> bool:
    """Whether a rank ever computes on less than the global batch."""
    return strategy.replicas * strategy.micro_batches > 1


def refusal(found: Coupling, strategy: Strategy) -> str:
    """Why a job of which this was found cannot be trained under a strategy as in one process; empty if it can be."""
    if found.kind in ("count-gradient", "backward"):
        return found.reason
    if found.kind in ("none", "unchecked") or not splits_batches(strategy):
        return ""
    return f"{strategy} splits the batch, but {found.reason}"


def couples_samples(
    job: Job, *, model: nn.Module | None = None, samples: int | None = None, within_s: float = math.inf,
    strategy: Strategy | None = None,
) -> Coupling:  # fmt: skip
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
    with torch.random.fork_rng(devices=[]):
        try:
            shares = strategy.replicas * strategy.micro_batches if strategy is not None else job.global_batch
            trial = _Trial(job, model, job.order().indices(0)[:num], share=-(-job.global_batch // shares))
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

    def __init__(self, job: Job, model: nn.Module | None, indices: np.ndarray, *, share: int) -> None:
        self.job, self.indices, self.share = job, indices, share
        self.outside = Outside(job)
        self.first = 0
        """Samples of the first of the two parts."""
        self.places_draws = False
        if model is None:
            torch.manual_seed(job.seed)
            model = job.model()
        known: dict[int, Any] = {id(result): result.detach().clone() for result in results_held(model)}
        self.start = _prepared(copied(model, known))
        self.seconds = 0.0
        """That a batch at once and in parts takes."""

    @property
    def sizes(self) -> tuple[int, int]:
        return self.first, len(self.indices) - self.first

    def found(self) -> Coupling:
        batch, again = self._read(self.indices), self._read(self.indices)
        if not _equal(batch, again):
            return self._found(
                "data", math.inf, "two reads of the same samples differ: batch(indices) must be a pure function of the "
                "indices; draw augmentations from a generator seeded by the index",
            )  # fmt: skip
        state = self._state()
        full, repeated = self._pass(batch), self._pass(batch, seed=2)
        if isinstance(full, str):
            return self._found("count-gradient", math.inf, full)
        assert isinstance(repeated, _Pass)
        if not math.isfinite(full.loss):
            return self._found(
                "unchecked", math.inf, f"the loss of its first {len(self.indices)} samples is {full.loss}"
            )
        if wrong := self._not_proportional(full, batch):
            return self._found("backward", math.inf, wrong)
        difference = _difference(full, repeated)
        if difference > TOLERANCE:
            # It draws numbers: then each sample draws its own, as in training.
            self.places_draws = True
            try:
                full, repeated = self._pass(batch), self._pass(batch, seed=2)
            except CannotPlace as error:
                return self._found("random", difference, f"no two passes over a batch are alike: {error}")
            assert isinstance(full, _Pass)
            assert isinstance(repeated, _Pass)
            difference = _difference(full, repeated)
        if difference > TOLERANCE:
            return self._found(
                "random", difference,
                "the model or the loss draws random numbers other than dropout, so that no two passes "
                "over a batch are alike; only a strategy that leaves the batch in one piece can be compared",
            )  # fmt: skip
        return self._in_parts(full, batch, state)

    def _not_proportional(self, full: _Pass, batch: Batch) -> str:
        """What is wrong if the gradients of a part of the loss are not that part of its gradients."""
        part = self._pass(batch, scale=EIGHTH)
        assert isinstance(part, _Pass)
        for name, param in self.start.named_parameters():
            one, other = (found.gradients.get(name) for found in (full, part))
            if one is not None and other is not None and _gradients_differ(EIGHTH * one, other):
                hooked = "a hook on it, or " if hooks_of(param) else ""
                return (
                    f"its backward is not linear: for an eighth of the loss the gradient of {name} is not an eighth of "
                    f"what it was ({hooked}a backward that clips, normalises or the like). Gradients are those of a "
                    "sum of losses, on each rank of its own samples, and are divided by the count in the end; limit "
                    "them by Job.clip, or change them in the optimizer's step"
                )
        return ""

    def of_more(self, indices: np.ndarray, found: Coupling) -> Coupling:
        """The same for more samples, after `found` was found for the first."""
        self.indices = indices
        batch = self._read(indices)
        full = self._pass(batch)
        assert isinstance(full, _Pass)
        if not math.isfinite(full.loss):
            return found
        return replace(self._in_parts(full, batch, found.state), ordered=found.ordered)

    def _in_parts(self, full: _Pass, batch: Batch, state: tuple[str, ...]) -> Coupling:
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
            assert isinstance(other, _Pass)
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
        return not isinstance(one, _Pass) or not isinstance(other, _Pass) or _difference(one, other) > TOLERANCE

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
                    losses.append(found.loss if isinstance(found, _Pass) else 0.0)
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
        start = self.start
        for value in LATER if names else ():
            self.indices, self.start = indices, copied(start)
            for name in names:
                set_counter(self.start, name, value)
            try:
                batch = self._read(indices)
                full = self._pass(batch)
                assert isinstance(full, _Pass)
                there = self._split(full, batch, found.state, 2 if len(indices) > 3 else 1)
            except Exception:  # A count that the model may never reach.
                continue
            finally:
                self.start = start
            if not there.independent:
                return replace(there, reason=f"{there.reason} (found where {names[0]} is {value})")
        return found

    def _split(self, full: _Pass, batch: Batch, state: tuple[str, ...], first: int) -> Coupling:
        self.first = first
        started = time.perf_counter()
        pieces = zip(np.split(self.indices, [first]), (0, first), strict=True)
        one, two = (self._pass(self._read(part), at=at) for part, at in pieces)
        self.seconds = max(2 * (time.perf_counter() - started), 1e-6)
        assert isinstance(one, _Pass)
        assert isinstance(two, _Pass)
        if self.job.loss_over == "batch":
            return self._of_outputs(full, one, two, state)
        difference = _difference(full, _sum(one, two))
        if difference <= TOLERANCE:
            return Coupling(kind="none", reason="", difference=difference, state=state)
        return self._named(full, one, two, batch, difference, state)

    def _named(
        self, full: _Pass, one: _Pass, two: _Pass, batch: Batch, difference: float, state: tuple[str, ...]
    ) -> Coupling:
        first, second = self.sizes
        of = f"of {first + second} samples it is {{:.6g}}, of {first} and {second} of them {{:.6g}} and {{:.6g}}"
        losses = of.format(full.loss, one.loss, two.loss)
        counts = of.format(full.count, one.count, two.count)
        added = _sum(one, two)
        if _difference(full, _replace(added, count=full.count)) <= TOLERANCE:
            return self._found(
                "count", difference,
                f"the count is wrong: {counts}, which does not add up. Return the number of samples or "
                "tokens that the loss is summed over",
            )  # fmt: skip
        if _is_average(full, one, two):
            return self._found(
                "mean", difference,
                f'the loss is a mean, not a sum: {losses}. Return (sum, count): reduction="sum" in the '
                "loss, and the number of samples or tokens that it is summed over",
            )  # fmt: skip
        if _is_average(_over_count(full), _over_count(one), _over_count(two)):
            return self._found(
                "count", difference, f"the count is not what the loss is a sum over: divided by its count, {losses} by "
                f"{full.count:g}, {one.count:g} and {two.count:g}, it is another average. Return the sum of the "
                "losses and the number of samples or tokens that it is summed over",
            )  # fmt: skip
        if all(len(entry) == first + second for entry in batch.values()):
            cuts = (slice(first), slice(first, None))
            cut = [self._pass({k: v[s] for k, v in batch.items()}, at=s.start or 0) for s in cuts]
            if all(isinstance(part, _Pass) for part in cut) and _difference(full, _sum(*cut)) <= TOLERANCE:  # type: ignore[arg-type]
                return self._found(
                    "padding", difference,
                    "what a sample computes depends on which samples are read with it (padding to "
                    f"the longest, for example); the loss does not add up: {losses}. "
                    "Pad all samples to one length, or mask what is padded in "
                    "the model and in the loss",
                )  # fmt: skip
        inside = _outputs_differ(full.output, one.output, two.output)
        if inside:
            reason = (
                f"the model couples samples ({inside}); the loss does not add up: {losses}. "
                "Use nn.BatchNorm for batch statistics (they are "
                "synchronised), a strategy that leaves the batch in one piece (tp, cp, pp with micro=1), or "
                'declare Job(loss_over="micro-batch") if each part of a batch is meant to be a batch of its own'
            )
        else:
            reason = (
                f'the loss couples samples and does not add up: {losses}. Declare Job(loss_over="batch") for a '
                'loss over the global batch (dp gathers the model\'s outputs), or loss_over="micro-batch" if each part '
                "of a batch is meant to have a loss of its own"
            )
        return self._found("coupled", difference, reason, state)

    def _of_outputs(self, full: _Pass, one: _Pass, two: _Pass, state: tuple[str, ...]) -> Coupling:
        """A loss over the global batch: outputs must be those of each sample, so that they can be gathered."""
        wrong = _outputs_differ(full.output, one.output, two.output)
        if not wrong:
            return Coupling(kind="none", reason="", state=state)
        return self._found(
            "coupled", math.inf, f'loss_over="batch" gathers the model\'s outputs, and they are not those of each '
            f"sample alone ({wrong}). Return tensors with the samples first, or numbers that do not depend on the "
            "batch, and leave what mixes samples to the loss", state,
        )  # fmt: skip

    def _found(self, kind: Kind, difference: float, reason: str, state: tuple[str, ...] = ()) -> Coupling:
        return Coupling(kind=kind, reason=f"job {self.job.name!r}: {reason}", difference=difference, state=state)

    def _read(self, indices: np.ndarray) -> Batch:
        return {name: to_float64(entry) for name, entry in self.job.train.batch(indices).items()}

    def _pass(
        self, batch: Batch, *, seed: int = 1, at: int = 0, samples: range | None = None, backward: bool = True,
        norms: bool = False, scale: float = 1.0,
    ) -> _Pass | str:  # fmt: skip
        """On a copy of the model, so that no pass sees what another left behind; text says what is wrong. `at`: the
        place of its first sample among all, or `samples`: the places of all. `norms`: batch norm as in training.
        `scale`: gradients are those of so much of the loss."""
        model = copied(self.start)
        if norms:
            model.train()
        drawn: Any = nullcontext()
        in_backward: Any = nullcontext()
        if self.places_draws:
            samples = samples or range(at, at + len(next(iter(batch.values()))))
            randomness = serial_randomness(self.job, model, torch.float64)
            drawn, in_backward = randomness.forward(samples, 0), randomness.backward()
        torch.manual_seed(seed)
        fixed: Any = nullcontext() if norms else FixedStatistics()
        with torch.set_grad_enabled(backward), self.outside.kept(), KeepFloat64(), Undropped(), fixed, drawn:
            output = self.job.run_model(model, batch)
            loss, count = self.job.loss_of(output, batch)
            if isinstance(count, torch.Tensor) and count.requires_grad:
                return COUNT_WITH_GRADIENT
            if loss.requires_grad and backward:
                with in_backward:
                    (loss if scale == 1.0 else loss * scale).backward()
        gradients = {name: param.grad.to_dense() for name, param in model.named_parameters() if param.grad is not None}
        return _Pass(float(loss.detach()), float(count), gradients, _detached(output))

    def _state(self) -> tuple[str, ...]:
        """What one forward changes in the model, batch norm's statistics aside."""
        model = copied(self.start)
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        before = HeldNow(module for module in model.modules() if not isinstance(module, _BatchNorm))
        with self.outside.kept(), KeepFloat64(), Undropped(), FixedStatistics() as norms:
            self.job.run_model(model, self._read(self.indices))
        changed = {name for name, param in model.named_parameters() if not _same(params.get(name), param)}
        changed |= set(before.changed_names(model))
        changed -= {name for name in changed if isinstance(model.get_submodule(name.rpartition(".")[0]), _BatchNorm)}
        if norms.asked:
            changed.add("statistics of batch_norm()")
        return tuple(sorted(changed))


class FixedStatistics(TorchFunctionMode):
    """Batch norm that modules call as a function: engines synchronise it too, so it is left out like the modules."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if given.get("training"):
            self.asked = True
            channels = given["input"].size(1)
            given["running_mean"] = given["input"].new_zeros(channels)
            given["running_var"] = given["input"].new_ones(channels)
            given["training"] = False
        return func(**given)


def _prepared(model: nn.Module) -> nn.Module:
    """In float64, without dropout, in training mode but for batch norm, and with nothing hidden behind zeros."""
    model = without_dropout(model_in_float64(model)).train()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() and not param.any():
                param.add_(START * torch.randn(param.shape, generator=generator, dtype=param.dtype))
    fix_norms(model)
    return model


def fix_norms(model: nn.Module) -> None:
    """Batch norm modules use their running statistics from now on, or fixed ones where they keep none."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if module.running_mean is None:
                like = next(
                    (t for t in (module.weight, module.bias) if t is not None), torch.zeros((), dtype=torch.float64)
                )
                module.running_mean = like.new_zeros(module.num_features)
                module.running_var = like.new_ones(module.num_features)
            module.eval()


def _equal(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and torch.equal(one[name].nan_to_num(), other[name].nan_to_num())
        if one[name].is_floating_point()
        else torch.equal(one[name], other[name])
        for name in one
    )


def _gradients_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > TOLERANCE * other.abs().max()) if one.numel() else False


def _sum(one: _Pass, two: _Pass) -> _Pass:
    gradients = {
        name: sum(part.gradients[name] for part in (one, two) if name in part.gradients)
        for name in one.gradients.keys() | two.gradients.keys()
    }
    return _Pass(one.loss + two.loss, one.count + two.count, gradients, None)  # type: ignore[arg-type]


def _replace(found: _Pass, *, count: float) -> _Pass:
    return _Pass(found.loss, count, found.gradients, None)


def _over_count(found: _Pass) -> _Pass:
    by = found.count or 1.0
    return _Pass(found.loss / by, 1.0, {name: value / by for name, value in found.gradients.items()}, None)


def _difference(one: _Pass, other: _Pass) -> float:
    """The largest relative difference of loss, count and gradients. A parameter without a gradient has one of zero."""
    rows = [
        abs(one.loss - other.loss) / max(abs(one.loss), abs(other.loss), 1e-300),
        abs(one.count - other.count) / max(abs(one.count), abs(other.count), 1e-300),
    ]
    every = [*one.gradients.values(), *other.gradients.values()]
    least = SMALLEST * max((float(g.abs().max()) for g in every if g.numel()), default=0.0)
    for name in one.gradients.keys() | other.gradients.keys():
        known = one.gradients[name] if name in one.gradients else other.gradients[name]
        if known.numel():
            a, b = (found.gradients.get(name, torch.zeros_like(known)) for found in (one, other))
            rows.append(float((a - b).abs().max()) / (max(float(a.abs().max()), least) or 1.0))
    return max(math.inf if math.isnan(row) else row for row in rows)


def _is_average(full: _Pass, one: _Pass, two: _Pass) -> bool:
    """Whether full = a * one + (1 - a) * two for one a between 0 and 1, in the loss and in every gradient."""
    names = full.gradients.keys() | one.gradients.keys() | two.gradients.keys()

    def flat(found: _Pass) -> torch.Tensor:
        known = {**two.gradients, **one.gradients, **full.gradients}
        rows = [torch.tensor([found.loss], dtype=torch.float64)]
        for name in sorted(names):
            value = found.gradients.get(name, torch.zeros_like(known[name]))
            rows.append((torch.view_as_real(value) if value.is_complex() else value).reshape(-1))
        return torch.cat(rows)

    x, y, z = flat(full), flat(one), flat(two)
    across = float((y - z).square().sum())
    if not across:
        return False
    a = float(((x - z) * (y - z)).sum()) / across
    return 0.0 < a < 1.0 and float((x - z - a * (y - z)).norm()) <= TOLERANCE * float(x.norm() + y.norm() + z.norm())


def _detached(output: Any) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(output)]


def _outputs_differ(full: list[Any], one: list[Any], two: list[Any]) -> str:
    """How the outputs of a batch differ from those of its parts laid end to end; empty if they do not."""
    for number, leaves in enumerate(zip(full, one, two, strict=False)):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            if isinstance(leaves[0], (str, bytes, bool, int, float, type(None))):
                continue
            return f"an output is a {type(leaves[0]).__name__}, which cannot be looked into"
        a, b, c = leaves
        which = f"output {number}, of shape {list(a.shape)}"
        together = b if not a.dim() else torch.cat([b, c]) if b.shape[1:] == c.shape[1:] else None
        if together is None or together.shape != a.shape:
            return f"{which}, has shapes {list(b.shape)} and {list(c.shape)} for the parts of the batch"
        wide = torch.complex128 if a.is_complex() else torch.float64
        scale = float(a.to(wide).abs().max()) if a.numel() else 0.0
        pairs = [(a, together)] if a.dim() else [(a, b), (a, c)]
        difference = max((float((x.to(wide) - y.to(wide)).abs().max()) for x, y in pairs if x.numel()), default=0.0)
        if not difference <= TOLERANCE * (scale or 1.0):
            return f"{which}, differs by {difference / (scale or 1.0):.1e} of its size in parts"
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    return type(one) is type(other) and one == other
