"""May a job's optimiser be given slices of parameters, single parameters, or only all of them together?

PyTorch's own element-wise optimisers are known. The name of any other proves nothing (a wrapper may hide anything), so
it is tried in float64, on copies of the job's parameters in their own groups. One optimiser steps all of them; others
step the same numbers in the layout that the engine would give to two ranks: flat, concatenated, cut anywhere. Gradients
differ greatly in magnitude, some are zero, some are missing, and step counters are advanced to reveal code that starts
late. An optimiser whose results agree to 1e-12 after every step, with pointwise operations only (pointwise.py), is
element-wise. If not, each parameter is stepped by an optimiser of its own. If that differs too, parameters are coupled.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.job.errors import JobError
from shoal.job.groups import Options, no_options
from shoal.job.kept import exact, holds_parameters, is_plain
from shoal.job.pointwise import OptimizerFactory, PointwiseCheck, looks_at_shapes
from shoal.job.probe_layouts import CUTS, Copy, Layout, Row, alone, copies_of, full, gradients, shrunk, sliced
from shoal.job.probe_run import MIDDLE, ProbeRun, tensors_in

Kind = Literal["elementwise", "parameter", "coupled"]

SMALL, STEPS = 1 << 12, 12
"""Number of elements to which all shapes are shrunk, and number of steps on them."""
JUMPS = (20, 64, 100, 240, 500, 1000, 1024, 5040, 10_000, 65_536, 100_000, 1_000_000)
"""Values to which counters are then set, one per step, to reveal code that starts late or runs every n steps."""

FEW = 2
"""Steps of a known optimiser, enough to create its state."""
KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
)
"""PyTorch's own element-wise optimisers. A test tries them, so a run need not."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What an optimiser requires."""

    kind: Kind
    """`elementwise`: slices suffice. `parameter`: full parameters, one at a time. `coupled`: all of them together."""
    name: str
    why: str = ""
    """Why it is not element-wise."""
    needs_closure: bool = False
    """Whether `step` requires a function that recomputes the loss (LBFGS)."""
    has_lr: bool = True
    kept: dict[str, Any] = field(default_factory=dict)
    """State after some steps on small copies, by location: what a checkpoint must hold."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Objects with changing contents that no checkpoint can hold: location -> type."""

    forgets: bool = False
    """Whether a new optimiser restored from this state continues differently: some state was not found."""

    @property
    def elementwise(self) -> bool:
        return self.kind == "elementwise"

    @property
    def coupled(self) -> bool:
        return self.kind == "coupled"


def probe(optimizer: OptimizerFactory, model: nn.Module, options: Options = no_options) -> Probe:
    """Tries an optimiser on copies of a model's parameters; the model may be on the meta device.

    Raises:
        JobError: The optimiser cannot be built for these parameters, or cannot step them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        copies = copies_of(model, options)
        small = [shrunk(copy, SMALL) for copy in copies]
        if (found := _known(optimizer, small)) is not None:
            return found
        reference, rows, wanted, watch = _reference(optimizer, small)
        about = reference.described()
        about["forgets"] = not about["opaque"] and _forgets(optimizer, reference, rows, wanted)
        if reference.needs_closure and all(sums_over_ranks(each) for each in reference.optimizers):
            return Probe(kind="elementwise", **about)
        if reference.needs_closure:
            return Probe(kind="coupled", why="its step computes the loss again", **about)
        lost = "rebuilt with all that was found of what it keeps, it goes on otherwise" if about["forgets"] else ""
        why = (
            reference.unsliceable() or lost or _differs(optimizer, small, sliced(small, rows), rows, wanted, reference)
        )
        if not why and watch.odd:
            why = f"an element is computed from others ({watch.odd})"
        if not why:
            rest = [(copy.name, copy.shape, copy.options, copy.dtype) for copy in copies if copy.numel > SMALL]
            by_group = {copy.which: copy for copy in small}.values()
            slices = [("a slice", (CUTS[0],), copy.options, copy.dtype) for copy in by_group]
            why = looks_at_shapes(optimizer, [*slices, *rest], longest=CUTS[-1])
        if not why:
            return Probe(kind="elementwise", **about)
        coupling = _differs(optimizer, small, alone(small), rows, wanted, reference)
        return Probe(kind="coupled" if coupling else "parameter", why=coupling or why, **about)


def sums_over_ranks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimiser takes any slices and sums what it computes of all of them over ranks by itself."""
    return getattr(optimizer, "sums_over_ranks", False) is True


def _known(factory: OptimizerFactory, copies: list[Copy]) -> Probe | None:
    """The probe of a known PyTorch optimiser, if it is unmodified: nothing overridden, no hooks."""
    run = built(factory, copies)
    optimizer = run.optimizers[0]
    own = type(optimizer) in KNOWN and inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooked = hooked or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    if not own or hooked or any(callable(value) for value in vars(optimizer).values()):
        return None
    try:
        run.train(gradients(copies, STEPS, absent=False)[:FEW])
    except Exception:
        return None
    return Probe(kind="elementwise", **run.described())


def _reference(
    factory: OptimizerFactory, copies: list[Copy]
) -> tuple[ProbeRun, list[Row], list[list[Tensor]], PointwiseCheck]:
    """One optimiser over all copies, the gradients it was given, and the copies after every step. If it fails in steps
    that a plain loop may never make (counters advanced, parameters without a gradient), these are skipped."""
    run = built(factory, copies)
    if run.needs_closure:
        rows = gradients(copies, STEPS + len(JUMPS), absent=False)[:STEPS]
        return run, rows, run.train(rows), PointwiseCheck()
    trouble: Exception | None = None
    for steps, absent in product((STEPS + len(JUMPS), STEPS), (True, False)):
        rows, watch = gradients(copies, steps, absent=absent), PointwiseCheck()
        try:
            return run, rows, run.train(rows, jumps=_jumps(steps), watch=watch), watch
        except Exception as error:
            trouble, run = trouble or error, built(factory, copies)
    assert trouble is not None
    raise _refusal(factory, copies, run.name, trouble) from trouble


def _forgets(factory: OptimizerFactory, reference: ProbeRun, rows: list[Row], wanted: list[list[Tensor]]) -> bool:
    """Whether a run resumed in the middle differs from the uninterrupted one, by one bit or by an error."""
    try:
        after = reference.resumed(factory).train(rows[MIDDLE:STEPS])
    except Exception:
        return True
    return any(exact(one) != exact(other) for one, other in zip(after, wanted[MIDDLE:STEPS], strict=True))


def _jumps(steps: int) -> dict[int, int]:
    return dict(zip(range(STEPS, steps), JUMPS, strict=False))


def built(factory: OptimizerFactory, copies: list[Copy]) -> ProbeRun:
    try:
        return ProbeRun(factory, copies, full(copies))
    except JobError:
        raise
    except Exception as error:
        raise JobError(
            f"the function `optimizer` fails for the model's parameters: {type(error).__name__}: {error}"
        ) from error


def _refusal(factory: OptimizerFactory, copies: list[Copy], name: str, error: Exception) -> JobError:
    rows = gradients(copies, STEPS, absent=False)
    for how in ({"sparse": True}, {"closure": True}):
        try:
            built(factory, copies).train(rows, **how)
        except Exception:
            continue
        if "sparse" in how:
            return JobError(
                f"{name} takes sparse gradients only, and Shoal sums gradients as dense tensors; use an optimiser "
                "that takes dense ones, such as torch.optim.Adam"
            )
        return JobError(
            f"{name} cannot step without a closure ({error}), and its step does not ask for one: declare it as "
            "step(self, closure), without a default, and Shoal passes one"
        )
    return JobError(f"{name} cannot step the model's parameters: {type(error).__name__}: {error}")


def _differs(
    factory: OptimizerFactory,
    copies: list[Copy],
    layout: Layout,
    rows: list[Row],
    wanted: list[list[Tensor]],
    reference: ProbeRun,
) -> str:
    """How another layout differs from the reference; empty if it does not."""
    single = len(layout) == len(copies) and all(len(rank) == 1 for rank in layout)
    how = "by an optimiser of its own" if single else "in slices"
    try:
        run = ProbeRun(factory, copies, layout)
        tolerance = reference.tolerance()
        run.counters = reference.counters
        for after, expected in zip(run.stepping(rows, jumps=_jumps(len(rows))), wanted, strict=True):
            for copy, mine, other in zip(copies, after, expected, strict=True):
                if not torch.allclose(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True):
                    return f"{copy.name} differs when it is stepped {how}"
    except Exception as error:
        return f"it cannot step parameters {how} ({error})"
    params = {id(param) for each in (run, reference) for row in each.params for param in row}
    expected_common = reference.common(0)
    for rank, tensors in enumerate(layout):
        if single and run.group_counts(rank) != reference.group_counts(0):
            return "it makes groups of its own, which depend on the parameters that it is given"
        for where, value in run.common(rank).items():
            group = where.rpartition("group ")[2].partition(":")[0]
            if single and group.isdecimal() and int(group) != tensors[0].which:
                continue  # A group of placeholders.
            other = expected_common.get(where)
            if is_plain(value) and not holds_parameters(value, params) and not _alike(value, other):
                return f"what it keeps for all parameters ({where}) depends on which it is given"
    if single:
        return ""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for each in (run, reference):
        for key, param, value in each.states():
            sized = isinstance(value, Tensor) and value.dim() > 0 and value.numel() == param.numel()
            if not sized and param.numel() > 1:
                shapes.setdefault(key, set()).update(tuple(leaf.shape) for leaf in tensors_in(value))
    varying = next((key for key, seen in shapes.items() if len(seen) > 1), None)
    return f"it keeps {varying!r} in a shape of its own" if varying is not None else ""


def _alike(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= 1e-9 * max(abs(value), abs(other)) or value != value
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        same = value.shape == other.shape and value.dtype == other.dtype
        return same and bool(torch.allclose(value, other, rtol=1e-9, atol=0.0, equal_nan=True))
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_alike, value, other))
    return exact(value) == exact(other)
