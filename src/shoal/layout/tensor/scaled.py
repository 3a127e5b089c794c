"""Which sizes in a model's code must be divided with a region, found by replaying it.

Candidates are integer attributes of the modules around the region, and of their configs, that equal a split size.
Starting with none, the one that lets the replay get furthest is added until the replay completes. If attributes alone
are not enough, sizes in calls (`view(B, T, C)`, where C is the width of the input) are divided as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from torch import nn

from shoal.layout.cuts import Cut
from shoal.layout.recorded import TracedCall
from shoal.layout.tensor.plan import ResizedView
from shoal.layout.tensor.regions import Found
from shoal.layout.tensor.replay import Attribute, Replay
from shoal.layout.tensor.resized import Key, Rehearsed, is_within
from shoal.layout.tensor.segments import Refuted
from shoal.layout.tensor.spread import Graph

MOST_TRIES = 128
TIMES = (2, 3)
"""Code that runs with twice and with three times the size does not depend on the size."""
NO_SIZES = {"in_features", "out_features", "in_channels", "out_channels", "num_features", "embedding_dim"}
"""Attributes that torch.nn's layers store but do not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is divided by the degree."""

    attributes: tuple[Attribute, ...] = ()
    """(module path, attribute)."""
    views: tuple[ResizedView, ...] = ()


class Scaling:
    """Finds the sizes of one region after another; identical regions are searched once."""

    def __init__(self, graph: Graph, modules: dict[str, nn.Module]) -> None:
        self.graph = graph
        self.modules = modules
        self._answers: dict[object, Sizes | Refuted] = {}
        self._together: dict[object, bool] = {}

    def sizes(self, found: Found) -> Sizes:
        """What must be divided with a region; raises Refuted if the code does not adapt."""
        if self._is_library_code(found):
            return Sizes(attributes=self._groups(found))
        call = self._call(found)
        key = self._likeness(found, call)
        if key not in self._answers:
            try:
                got = self._search(found, call)
                answer: Sizes | Refuted = Sizes(
                    attributes=tuple((_below(path, call.path), name) for path, name in got.attributes),
                    views=tuple(replace(view, module=_below(view.module, call.path)) for view in got.views),
                )
            except Refuted as refusal:
                answer = refusal
            self._answers[key] = answer
        answer = self._answers[key]
        if isinstance(answer, Refuted):
            raise answer
        return Sizes(
            attributes=tuple((_join(call.path, path), name) for path, name in answer.attributes),
            views=tuple(replace(view, module=_join(call.path, view.module)) for view in answer.views),
        )

    def hold_together(self, found: list[tuple[Found, Sizes]]) -> bool:
        """Whether the regions of one call still run when all of them are split at once."""
        cuts = {v: cut for region, _ in found for v, cut in region.spreading.cuts.items()}
        numbers = {number for region, _ in found for number in region.interior | region.spreading.sums}
        calls = [call for call in self.graph.trace.calls if call.first <= min(numbers) and max(numbers) < call.stop]
        if not calls:
            return True
        call = min(calls, key=lambda call: call.stop - call.first)
        scaled = tuple(dict.fromkeys(attribute for _, sizes in found for attribute in sizes.attributes))
        parameters = {v: cut for v, cut in cuts.items() if self.graph.values[v].name}
        key = ("together", call.path.count("."), self._ops_of(call), _relative(parameters, self.graph, call))
        if key not in self._together:
            only = frozenset((view.module, view.order) for _, sizes in found for view in sizes.views)
            resized = Rehearsed(self.graph, call, cuts, TIMES[0], only) if only else None
            replay = Replay(self.graph, call, self.modules)
            self._together[key] = replay.progress(cuts, TIMES[0], scaled, resized)[1]
        return self._together[key]

    def _is_library_code(self, found: Found) -> bool:
        """Layers of torch.nn read no sizes but those of their weights (and the number of groups)."""
        paths = {self.graph.ops[number].module for number in found.interior | found.spreading.sums}
        return all(_reads_no_sizes(self.modules[path]) for path in paths) or any(
            isinstance(self.modules[path], nn.MultiheadAttention) for path in paths
        )

    def _groups(self, found: Found) -> tuple[Attribute, ...]:
        paths = dict.fromkeys(self.graph.ops[number].module for number in sorted(found.interior))
        scaled: list[Attribute] = []
        for path in paths:
            module = self.modules[path]
            if isinstance(module, nn.GroupNorm):
                scaled.append((path, "num_groups"))
            elif getattr(module, "groups", 1) != 1:
                scaled.append((path, "groups"))
        return tuple(scaled)

    def _call(self, found: Found) -> TracedCall:
        """The call of the smallest module that holds all of the region."""
        numbers = found.interior | found.spreading.sums
        first, last = min(numbers), max(numbers)
        calls = [call for call in self.graph.trace.calls if call.first <= first and last < call.stop]
        if not calls:
            raise Refuted("no call of a module holds all of it")
        return min(calls, key=lambda call: (call.stop - call.first, -len(call.path)))

    def _likeness(self, found: Found, call: TracedCall) -> object:
        cuts = tuple((_below(name, call.path), cut) for name, cut in found.cuts.items())
        named = tuple(
            (_below(each.module, call.path), each.order, each.function, each.sizes)
            for each in self.graph.trace.sized_calls
            if is_within(self.graph.trace.calls[each.call], call)
        )
        return type(self.modules[call.path]), self._ops_of(call), cuts, named

    def _ops_of(self, call: TracedCall) -> object:
        return tuple(
            (op.name, _below(op.module, call.path), tuple(self.graph.values[v].shape for v in op.outputs))
            for op in self.graph.ops[call.first : call.stop]
        )

    def _search(self, found: Found, call: TracedCall) -> Sizes:
        """By attributes alone if possible; else with sizes in calls divided too."""
        replay = Replay(self.graph, call, self.modules)
        try:
            return Sizes(attributes=self._attributes(found, call, replay, resizing=False)[0])
        except Refuted as refusal:
            cuts = found.spreading.cuts
            if not Rehearsed(self.graph, call, cuts, TIMES[0]).may_change:
                raise
            try:
                chosen, views = self._attributes(found, call, replay, resizing=True)
            except Refuted:
                raise refusal from None
            self._check_views(found, call, replay, chosen, views)
            return Sizes(attributes=chosen, views=tuple(views.values()))

    def _attributes(
        self, found: Found, call: TracedCall, replay: Replay, *, resizing: bool
    ) -> tuple[tuple[Attribute, ...], dict[Key, ResizedView]]:
        cuts = found.spreading.cuts
        views: dict[Key, ResizedView] = {}

        def progress(scaled: tuple[Attribute, ...]) -> tuple[int, bool]:
            nonlocal views
            resized = Rehearsed(self.graph, call, cuts, TIMES[0]) if resizing else None
            got = replay.progress(cuts, TIMES[0], scaled, resized)
            views = resized.changed if resized is not None else {}
            return got

        chosen: tuple[Attribute, ...] = ()
        reached, done = progress(chosen)
        candidates = self._candidates(found, call)
        tries = 0
        while not done:
            best: tuple[int, tuple[Attribute, ...]] = (reached, ())
            for size in (1, 2):
                for more in combinations([c for c in candidates if c not in chosen], size):
                    tries += 1
                    if tries > MOST_TRIES:
                        break
                    got, done = progress((*chosen, *more))
                    if done or got > best[0]:
                        best = (got, more)
                    if done:
                        break
                if best[1]:
                    break
            if not best[1]:
                raise Refuted(
                    f"the code of {call.path or 'the model'} names a size that was not found in any attribute"
                )
            reached, chosen = best[0], (*chosen, *best[1])
        resized = Rehearsed(self.graph, call, cuts, TIMES[1], frozenset(views)) if resizing else None
        if not replay.progress(cuts, TIMES[1], chosen, resized)[1]:
            raise Refuted(f"the code of {call.path or 'the model'} follows some sizes but not others")
        return chosen, views

    def _check_views(
        self,
        found: Found,
        call: TracedCall,
        replay: Replay,
        scaled: tuple[Attribute, ...],
        views: dict[Key, ResizedView],
    ) -> None:
        """A call is identified by its number, which must be the same in every call of the module, and in evaluation."""
        owners = {path for path, _ in views}
        for each in self.graph.trace.calls:
            if each.path in owners and not is_within(each, call):
                raise Refuted(f"{each.path} names sizes in its code and is also called elsewhere")
        resized = Rehearsed(self.graph, call, found.spreading.cuts, TIMES[0], frozenset(views))
        if not replay.runs_in_evaluation(found.spreading.cuts, TIMES[0], scaled, resized):
            raise Refuted(f"the code of {call.path or 'the model'} names sizes and takes another branch in evaluation")

    def _candidates(self, found: Found, call: TracedCall) -> list[Attribute]:
        """Those of the innermost modules first."""
        cuts = found.spreading.cuts
        sizes = {size for cut in cuts.values() for size in (*cut.segments, cut.size)} | found.spreading.units
        inside = {self.graph.ops[number].module for number in found.interior | found.spreading.sums}
        for path in list(inside):
            while path != call.path and path:
                path = path.rpartition(".")[0]
                inside.add(path)
        inside.add(call.path)
        candidates: list[Attribute] = []
        for path in sorted(inside, key=lambda path: (-path.count("."), path)):
            if not (path == call.path or not call.path or path.startswith(call.path + ".")) or path not in self.modules:
                continue
            held = vars(self.modules[path])
            candidates += [
                (path, name)
                for name, value in held.items()
                if not name.startswith("_") and name not in NO_SIZES and _is_size(value, sizes)
            ]
            config = held.get("config")
            if config is not None and hasattr(config, "__dict__"):
                candidates += [(path, f"config.{n}") for n, v in vars(config).items() if _is_size(v, sizes)]
        return candidates


def _relative(cuts: dict[int, Cut], graph: Graph, call: TracedCall) -> object:
    return tuple(sorted((_below(graph.values[v].name, call.path), cut.dim, cut.segments) for v, cut in cuts.items()))


def _is_size(value: object, sizes: set[int]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1 and value in sizes


def _reads_no_sizes(module: nn.Module) -> bool:
    named = type(module).__module__.startswith("torch.nn.modules.")
    return named and not isinstance(module, (nn.Unflatten, nn.Fold, nn.Unfold, nn.PixelShuffle, nn.PixelUnshuffle))


def _below(path: str, root: str) -> str:
    if not root or path == root:
        return path if not root else ""
    return path[len(root) + 1 :] if path.startswith(root + ".") else f"/{path}"


def _join(root: str, path: str) -> str:
    return f"{root}.{path}" if root and path else root or path
