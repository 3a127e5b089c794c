"""Expert parallelism: the experts of each mixture are split among ranks, and tokens travel to them and back.

The model is not rewritten. `shard_experts` leaves each rank the experts [i*E/n, (i+1)*E/n) of each layer that
`layout/experts/find.py` found, under the names they had, and puts the exchange of tokens around the layer's own code.
What is routed stays the model's business: a model that drops tokens beyond a capacity does so before its experts are
called, so the capacity is counted by rank (the contract is `statistical` then), and a load-balancing loss
that the model computes from its router is a mean over the tokens of each rank.

Gradients of experts are complete over the ranks that share them: what is left is their sum over replicas of the same
experts (dp, cp), while all other parameters also sum over these ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import nn

from shoal.comm.mesh import Members
from shoal.layout.experts.find import ExpertError, ExpertLayer
from shoal.layout.routed import Routed
from shoal.parallel.expert.listed import ListedExperts, ListedForward
from shoal.parallel.expert.stacked import StackedExperts

REMEMBERED_RUNS = 1024
"""Runs of layers whose routing is kept for `take_routed`; older ones are forgotten."""

_HISTORY = "_shoal_routed"
_CALLERS = "_shoal_callers"
_BEFORE = "_shoal_before_runs"


def shard_experts(model: nn.Module, layers: Sequence[ExpertLayer], members: Members) -> list[str]:
    """Keeps this rank's experts of each layer only, and makes the layers exchange tokens among `members`.

    Returns the names of the parameters that are cut (stacked: fewer rows, same name) or absent here (listed: a module
    without parameters takes the expert's place). All ranks must hold the same values when they call it.
    """
    if members.size == 1:
        return []
    for layer in layers:
        if layer.count % members.size:
            raise ExpertError(
                f"{layer.path}: {layer.count} experts do not divide among {members.size} ranks; use a number of ranks "
                f"that divides {layer.count}"
            )
    before = dict(model.named_parameters())
    history: deque[Routed] = deque(maxlen=REMEMBERED_RUNS)
    by_owner: dict[str, list[ListedExperts]] = {}
    for layer in layers:
        if layer.form == "stacked":
            StackedExperts(model.get_submodule(layer.path), layer, members, history)
        else:
            by_owner.setdefault(layer.owner, []).append(ListedExperts(model, layer, members, history))
    forwards = {owner: ListedForward(model.get_submodule(owner), lists) for owner, lists in by_owner.items()}
    setattr(model, _BEFORE, {owner: forward.before_runs for owner, forward in forwards.items()})
    setattr(model, _HISTORY, history)
    setattr(
        model,
        _CALLERS,
        {each.layer.path: list(each.placeholders.values()) for lists in by_owner.values() for each in lists},
    )
    after = dict(model.named_parameters())
    return [name for name, param in before.items() if after.get(name) is not param]


def take_routed(model: nn.Module) -> list[Routed]:
    """What each run of each layer sent since the last call, oldest first; recomputed runs are runs too."""
    history: deque[Routed] = getattr(model, _HISTORY, deque())
    taken = list(history)
    history.clear()
    return taken


def before_runs(model: nn.Module, owner: str) -> list[Callable[[], None]]:
    """What is called where a module that routes to listed experts begins a run; whoever observes it adds to this."""
    found: dict[str, list[Callable[[], None]]] = getattr(model, _BEFORE, {})
    return found.get(owner, [])


def callers(model: nn.Module, path: str) -> list[nn.Module]:
    """For a list of experts that is split: what takes each expert's calls while the module that routes runs."""
    found: dict[str, list[nn.Module]] = getattr(model, _CALLERS, {})
    return found.get(path, [])
