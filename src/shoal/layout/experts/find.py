"""Which parts of a model are experts: alternatives among which a router chooses, found in one small run.

Names of known model families are not used. Experts come in two forms. *Listed*: a `ModuleList` or `ModuleDict` of
identical modules whose inputs do not depend on each other's outputs (a chain of layers fails that test). *Stacked*: one
module whose parameters all have the experts as their leading dimension, called with tokens, indices and weights.
Modules that look like experts but cannot be distributed are reported with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from shoal.job.gradient_hooks import hooks_of
from shoal.layout.experts.listed import Listed, like_members, why_not_listed
from shoal.layout.experts.rehearsal import random_state, rehearsing, set_random_state
from shoal.layout.experts.stacked import Stacked, stacked_count, why_not_stacked
from shoal.layout.experts.watch import ExpertWatch, device_of

Form = Literal["listed", "stacked"]


class ExpertError(ValueError):
    """A model whose experts cannot be distributed, or that calls them in an unsupported way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """One set of experts in a model."""

    path: str
    """Listed: the list. Stacked: the module that holds the stacks."""
    form: Form
    count: int
    owner: str
    """The module whose forward calls the experts; stacked: the module itself."""
    parameter_names: tuple[str, ...]
    """All parameters of all experts, by the model's names: their gradients are summed over the experts' replicas."""
    width: int
    """Width of a token at an expert's input."""
    result_width: int
    """Width of an expert's output."""
    members: tuple[str, ...] = ()
    """Listed: the key of each expert in the list."""
    count_names: tuple[str, ...] = ()
    """Stacked: attributes that hold the number of experts, to be changed on a rank with fewer."""
    keeps_dtype: bool = True
    """Whether the output of experts has the dtype of their input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """Modules that look like experts but cannot be distributed."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The experts that a run found."""

    layers: tuple[ExpertLayer, ...]
    """In call order."""
    passed_over: tuple[PassedOver, ...]


def find_experts(model: nn.Module, run: Callable[[], object]) -> list[ExpertLayer]:
    """The model's expert layers. `run()` calls the model on a small batch; hooks are installed only meanwhile."""
    return list(survey_experts(model, run).layers)


def survey_experts(model: nn.Module, run: Callable[[], object]) -> Survey:
    """Like `find_experts`, with rejected modules and why. The model and the random state are restored."""
    lists = {path: members for path, module in model.named_modules() if (members := like_members(module))}
    stacks = {path: count for path, module in model.named_modules() if (count := stacked_count(module))}
    if not lists and not stacks:
        return Survey(layers=(), passed_over=())
    device = device_of(model)
    before = random_state(device)
    watch = ExpertWatch(model, lists=lists, stacks=list(stacks))
    try:
        with rehearsing(model), watch:
            run()
        found = [_listed(model, path, watch) for path in lists if path in watch.list_calls]
        found += [_stacked(model, path, count, watch) for path, count in stacks.items() if path in watch.stack_calls]
    finally:
        set_random_state(before, device)
    in_order = [each for _, each in sorted((pair for pair in found if pair), key=lambda pair: pair[0])]
    layers = [each for each in in_order if isinstance(each, ExpertLayer)]
    return Survey(
        # Nested experts stay together: only the outer ones are distributed.
        layers=tuple(layer for layer in layers if not any(_lies_in(layer.path, other.path) for other in layers)),
        passed_over=tuple(each for each in in_order if isinstance(each, PassedOver)),
    )


Found = tuple[int, ExpertLayer | PassedOver]


def _listed(model: nn.Module, path: str, watch: ExpertWatch) -> Found | None:
    verdict = why_not_listed(model, path, watch)
    at = watch.list_calls[path][0].number
    names = tuple(name for key in watch.lists[path] for name in _names_below(model, f"{path}.{key}" if path else key))
    if isinstance(verdict, Listed):
        if shared := _shared(model, names):
            return at, PassedOver(path=path, reason=f"{path}: the parameter {shared} is used elsewhere too")
        return at, ExpertLayer(
            path=path,
            form="listed",
            count=len(watch.lists[path]),
            owner=verdict.owner,
            parameter_names=names,
            width=verdict.width,
            result_width=verdict.result_width,
            members=watch.lists[path],
            keeps_dtype=verdict.keeps_dtype,
        )
    return (at, PassedOver(path=path, reason=f"{path or 'the model'}: {verdict}")) if verdict else None


def _stacked(model: nn.Module, path: str, count: int, watch: ExpertWatch) -> Found | None:
    module, call = model.get_submodule(path), watch.stack_calls[path]
    verdict = why_not_stacked(module, count, call)
    names = tuple(f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False))
    if isinstance(verdict, Stacked):
        if shared := _shared(model, names):
            return call.number, PassedOver(path=path, reason=f"{path}: the parameter {shared} is used elsewhere too")
        if hooked := next((name for name in names if hooks_of(model.get_parameter(name))), None):
            reason = f"{path}: a hook on the gradient of {hooked} would see the part of some experts only"
            return call.number, PassedOver(path=path, reason=reason)
        return call.number, ExpertLayer(
            path=path,
            form="stacked",
            count=count,
            owner=path,
            parameter_names=names,
            width=verdict.width,
            result_width=verdict.result_width,
            count_names=verdict.count_names,
            keeps_dtype=verdict.keeps_dtype,
        )
    return (call.number, PassedOver(path=path, reason=f"{path or 'the model'}: {verdict}")) if verdict else None


def _names_below(model: nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters()]


def _shared(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """One of these parameters that the model also has under another name."""
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    return next((name for name in names if uses[id(model.get_parameter(name))] > 1), None)


def _lies_in(path: str, other: str) -> bool:
    return path != other and path.startswith(f"{other}." if other else "")
