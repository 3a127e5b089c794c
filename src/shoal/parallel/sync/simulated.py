"""The rounds of an `Averaged` scheme in one process, in plain PyTorch: what proofs compare with.

Islands are full copies of the model, one tensor for each parameter. Of the code that runs nothing is used but the rule
by which layers go to fragments, and when; `simulate_outer` of a scheme is a formula of its own, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.parallel.sync.fragments import fragments_of, sent_after

if TYPE_CHECKING:
    from shoal.parallel.sync.averaged import Averaged


def simulate_rounds(scheme: Averaged, step: int, islands: Sequence[Any]) -> None:
    """What all islands do after a step, counted from 1."""
    plan = scheme.plan
    if step <= plan.start:
        _average_buffers(islands, [island.counted / sum(each.counted for each in islands) for island in islands])
        for island in islands:
            island.counted = 0.0
            island.kept["anchor"] = [param.detach().clone() for param in island.named.values()]
        return
    names = list(islands[0].named)
    groups = fragments_of(names, plan.fragments)
    for island in islands:
        # What each fragment of each island learned from since it was last sent: (samples, steps).
        seen = island.kept.numbers.setdefault("simulated", [[0.0, 0] for _ in groups])
        before = island.kept.numbers.get("counted", 0.0)
        for each in seen:
            each[0] += island.counted - before
            each[1] += 1
        island.kept.numbers["counted"] = island.counted
    for p, group in enumerate(groups):
        places = [at for at, name in enumerate(names) if name in group]
        first = sent_after(p, plan.fragments, plan.h)
        if plan.overlap and step - plan.overlap >= first and (step - plan.overlap - first) % plan.h == 0:
            for island in islands:
                _apply(scheme, island, places, [island.kept.numbers[f"on the way {p}"][at] for at in places])
        if step >= first and (step - first) % plan.h == 0:
            _send(scheme, islands, p, places, step)


def _send(scheme: Averaged, islands: Sequence[Any], p: int, places: Sequence[int], step: int) -> None:
    plan = scheme.plan
    counts = []
    for island in islands:
        learned, steps = island.kept.numbers["simulated"][p]
        counts.append({"samples": learned, "equal": 1.0, "tokens2/steps": learned**2 / steps}[plan.weight])
        island.kept.numbers["simulated"][p] = [0.0, 0]
    weights = [count / sum(counts) for count in counts]
    moves = [{at: island.kept["anchor"][at] - [*island.named.values()][at] for at in places} for island in islands]
    mean = {at: merged([move[at] for move in moves], weights, plan.merge) for at in places}
    for island, move, weight in zip(islands, moves, weights, strict=True):
        numbers = island.kept.numbers
        if plan.eager:
            others = numbers.get(f"on the way {p}")
            last, share = numbers.get(f"own {p}"), numbers.get(f"share {p}", 1 / len(islands))
            fresh = []
            for at in places:
                if others is None:
                    fresh.append(move[at] * share)
                else:
                    fresh.append(others[at] - share * last[at] + share * move[at])
            _apply(scheme, island, places, fresh)
            numbers[f"own {p}"], numbers[f"share {p}"], numbers[f"on the way {p}"] = move, weight, mean
        elif plan.overlap:
            numbers[f"on the way {p}"] = mean
        else:
            _apply(scheme, island, places, [mean[at] for at in places])
    if plan.plain:
        _average_buffers(islands, weights)
        for island in islands:
            island.counted = island.kept.numbers["counted"] = 0.0
            if plan.state == "reset":
                island.begin_anew()
        if plan.state == "averaged":
            _average_moments(islands, weights, step, {"m": plan.m or plan.h, "v": plan.v or plan.h})


def merged(moves: Sequence[torch.Tensor], weights: Sequence[float], merge: str) -> torch.Tensor:
    if merge == "mean":
        return torch.stack([weight * move for weight, move in zip(weights, moves, strict=True)]).sum(0)
    norms = [float(move.norm()) for move in moves]
    units = [move / norm if norm else move for move, norm in zip(moves, norms, strict=True)]
    direction = torch.stack([weight * unit for weight, unit in zip(weights, units, strict=True)]).sum(0)
    length = sum(weight * norm for weight, norm in zip(weights, norms, strict=True))
    return direction / direction.norm() * length if float(direction.norm()) else direction


def _apply(scheme: Averaged, island: Any, places: Sequence[int], moves: Sequence[torch.Tensor]) -> None:
    parameters = [*island.named.values()]
    for at, move in zip(places, moves, strict=True):
        what = ("anchor", *scheme.outer_state)
        after = scheme.simulate_outer(move, {name: island.kept[name][at] for name in what})
        for name in what:
            island.kept[name][at] = after[name]
        blend = scheme.plan.blend
        parameters[at].copy_(blend * parameters[at] + (1 - blend) * after["anchor"])


def _average_moments(islands: Sequence[Any], weights: Sequence[float], step: int, periods: dict[str, int]) -> None:
    """First moments every so many steps, and second ones."""
    for params in zip(*(island.named.values() for island in islands), strict=True):
        states = [island.optimizer.state.get(param, {}) for island, param in zip(islands, params, strict=True)]
        for key in sorted(set().union(*states)):
            second = key in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
            held = [state.get(key) for state in states]
            sized = [value for value in held if isinstance(value, torch.Tensor) and value.shape == params[0].shape]
            if step % periods["v" if second else "m"] or not sized or not params[0].dim():
                continue
            mean = torch.zeros_like(sized[0])
            for weight, value in zip(weights, held, strict=True):
                mean += 0 if value is None else weight * value
            for value in sized:
                value.copy_(mean)


def _average_buffers(islands: Sequence[Any], weights: Sequence[float]) -> None:
    for tensors in zip(*(island.model.buffers() for island in islands), strict=True):
        if tensors[0].is_floating_point() or tensors[0].is_complex():
            wide = torch.complex128 if tensors[0].is_complex() else torch.float64
            mean = torch.stack([w * t.to(wide) for w, t in zip(weights, tensors, strict=True)]).sum(0)
            for tensor in tensors:
                tensor.copy_(mean)


class _Near:
    """An island as the inner one of two loose levels sees it."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.counted = kept, 0.0
        self.island: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.island, name)


class NestedAverages:
    """Two levels that average, one inside the other: neighbouring islands in groups of `size`, then all."""

    def __init__(self, outer: Averaged, inner: Averaged, size: int) -> None:
        self.outer, self.inner, self.size = outer, inner, size

    def begin(self, parameters: Sequence[torch.Tensor]) -> Any:
        from shoal.parallel.sync.scheme import Kept

        kept: Any = Kept(self.outer, parameters)
        kept.near = _Near(Kept(self.inner, parameters))
        return kept

    def simulate(self, clock: int, islands: Sequence[Any]) -> bool:
        """What all islands do after a step, from 0."""
        nears = [island.kept.near for island in islands]
        for near, island in zip(nears, islands, strict=True):
            near.island = island
            near.counted += island.own_count
        for start in range(0, len(islands), self.size):
            simulate_rounds(self.inner, clock + 1, nears[start : start + self.size])
        simulate_rounds(self.outer, clock + 1, islands)
        if (clock + 1) % self.outer.plan.h == 0:
            for near in nears:
                near.counted = near.kept.numbers["counted"] = 0.0
                near.kept["anchor"] = [param.detach().clone() for param in near.named.values()]
        return True
