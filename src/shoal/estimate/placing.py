"""Which ranks a rank shares its batch, its parameters and its sums with, from the strategy alone.

The prediction's own account of what `parallel/placement.py` does with process groups: names and sizes of groups, as the
ledger has them. Every parameter belongs to a family, whose gradients are summed over the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shoal.estimate.traffic import Group
from shoal.strategy import Strategy, cp, dp, ep, none, offload, pp, shared, spatial, tp
from shoal.strategy.islands import is_loose
from shoal.strategy.seats import seats_of

ALONE = Group(axis="none", ranks=1)


@dataclass(frozen=True, slots=True)
class Member:
    """A group of ranks as one of them sees it."""

    group: Group
    index: int = 0

    @property
    def ranks(self) -> int:
        return self.group.ranks


@dataclass(frozen=True, slots=True)
class PredictedFamily:
    """What parameters have in common that are reduced together."""

    cut: bool = False
    partial: bool = False
    expert: bool = False
    stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PredictedRoute:
    """Where a level of dp compresses: those inside the level, between its ranks, and outside."""

    inside: Member
    between: Member
    outside: Member
    whole: bool


@dataclass(frozen=True, slots=True)
class PredictedReplicas:
    """Those whose gradients of a family are summed."""

    everyone: Member
    sharding: Member
    copies: Member
    route: PredictedRoute | None


class Placing:
    """The groups of one rank."""

    def __init__(self, strategy: Strategy, rank: int) -> None:
        self.axes = [(axis.name, axis.size) for axis in strategy.axes]
        self.place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, self.place[name] = divmod(rank, size)
        self._known: dict[tuple[str, ...], Member] = {}
        terms = {axis.name: axis.term for axis in strategy.axes}
        loose = [name for name, term in terms.items() if is_loose(term)]
        self.levels = [name for name, term in terms.items() if isinstance(term, dp) and name not in loose]
        together = [name for name in self.levels if isinstance(terms[name].via, shared)]  # type: ignore[attr-defined]
        sharded = [name for name in self.levels if terms[name].zero]  # type: ignore[attr-defined]
        self.seats = seats_of(strategy)
        self.summed = [name for name in self.levels if self.seats is None or name != self.seats.axis]
        """Levels whose gradients are summed by collectives."""
        self.one_memory = bool(together)
        self.zero: int = 1 if together else terms[sharded[0]].zero if sharded else 0  # type: ignore[attr-defined]
        self.sharded = next(iter(together or sharded), None)
        if self.sharded is None and any(term.what == "parameters" for term in strategy.all_of(offload)):
            self.zero = 3
        if self.seats is not None and self.summed and not sharded:
            self.zero, self.sharded = 1, self.summed[-1]
        compressing = [
            name
            for name, size in self.axes
            if name in self.summed and size > 1 and not isinstance(terms[name].compress, none)  # type: ignore[attr-defined]
        ]
        self.compressing = compressing[0] if compressing else None
        self.compression = terms[compressing[0]].compress if compressing else None  # type: ignore[attr-defined]
        self.names: dict[type, str | None] = {
            cls: next((name for name, term in terms.items() if isinstance(term, cls)), None)
            for cls in (pp, tp, cp, ep, spatial)
        }
        self.pipeline, self.tensor, self.context, self.experts = (self._axis(cls) for cls in (pp, tp, cp, ep))
        self.planes = self._axis(spatial)
        tensor = strategy.term(tp)
        self.batch_over_tp = tensor is not None and tensor.batch
        data = self.along(*self.levels, label="dp")
        sampling = [*self.levels, *self._named(ep), *(self._named(tp) if self.batch_over_tp else ())]
        self.samples_axes = tuple(sampling)
        self.samples = data if sampling == self.levels else self.along(*sampling)
        self.split = self.along(*loose, *sampling) if loose else self.samples
        """The ranks that split the global batch, of all islands."""
        self.islands = self.along(*loose) if loose else Member(ALONE)
        """The ranks that hold the same part of the model in each island."""
        self.near = self.along(loose[-1]) if len(loose) > 1 else None
        """Of these, those that the inner one of two loose levels ties together."""
        inside = [name for name, _ in self.axes if name not in loose]
        label = "island" if loose else "world"
        self.island = data if set(inside) == set(self.levels) else self.along(*inside, label=label)
        """The ranks that step together."""
        cuts = [*([self.sharded] if self.sharded else []), *self._named(pp), *self._named(tp), *self._named(ep)]
        self.norm = self.along(*cuts)

    def _axis(self, cls: type) -> Member:
        name = self.names[cls]
        return Member(ALONE) if name is None else self.along(name)

    def _named(self, cls: type) -> tuple[str, ...]:
        name = self.names[cls]
        return () if name is None else (name,)

    def along(self, *names: str, label: str | None = None) -> Member:
        """Those along some axes; the first to ask for them gives the group its name."""
        key = tuple(name for name, _ in self.axes if name in names)
        if key not in self._known:
            sizes = dict(self.axes)
            index = 0
            for name in key:
                index = index * sizes[name] + self.place[name]
            ranks = prod(sizes[name] for name in key)
            self._known[key] = Member(Group(axis=label or "+".join(key) or "none", ranks=ranks), index)
        return self._known[key]

    def _among(self, names: Sequence[str], stages: tuple[int, ...], label: str | None) -> Member:
        """Those along some axes, and at some places of the pipeline, where a tied weight has several."""
        pipeline = self.names[pp]
        if len(stages) < 2 or pipeline is None:
            return self.along(*names, label=label)
        sizes = dict(self.axes)
        key = [name for name, _ in self.axes if name in names]
        here = self.place[pipeline] in stages
        ranks = len(stages) * prod(sizes[name] for name in key) if here else 1
        order = [name for name, _ in self.axes if name in (*key, pipeline)]
        index = 0
        for name in order:
            at, size = self.place[name], sizes[name]
            if name == pipeline:
                at, size = (stages.index(at) if here else 0), len(stages)
            index = index * size + at
        return Member(Group(axis="+".join([*key, f"{pipeline}{list(stages)}"]), ranks=ranks), index)

    def replicas(self, family: PredictedFamily) -> PredictedReplicas:
        over = [*self.summed, *self._named(cp), *self._named(spatial)]
        over += () if family.expert else self._named(ep)
        over += self._named(tp) if family.partial else ()
        label = "dp" if set(over) == set(self.summed) else None
        route = self._route(over, family)
        if not self.zero:
            everyone = self._among(over, family.stages, label)
            return PredictedReplicas(everyone, Member(Group(axis="dp", ranks=1)), everyone, route)
        rest = [name for name in over if name != self.sharded]
        sharding = Member(Group(axis="dp", ranks=1)) if self.sharded is None else self.along(self.sharded)
        return PredictedReplicas(
            self.along(*over, label=label), sharding, self._among(rest, family.stages, None), route
        )

    def _route(self, over: Sequence[str], family: PredictedFamily) -> PredictedRoute | None:
        if self.compressing is None:
            return None
        outside = self.summed[: self.summed.index(self.compressing)]
        inside = [name for name in over if name not in (*outside, self.compressing, self.sharded)]
        return PredictedRoute(
            self._among(inside, family.stages, None),
            self.along(self.compressing),
            self.along(*outside),
            self.compressing == self.sharded,
        )

    def plane_statistics(self, *, samples: bool) -> Member:
        """Those that share statistics of planes; `samples`: over all samples of an island."""
        return self.along(*(self.samples_axes if samples else ()), *self._named(spatial))

    def pieces(self, cut: type | None) -> Member:
        """Those that hold pieces of the same parameter: they shard it, or it is cut across them."""
        names = [self.sharded] if self.sharded else []
        return self.along(*names, *(self._named(cut) if cut is not None else ()))

    def colleagues(self) -> Member:
        """Those who work on the same stage of a pipeline."""
        return self.along(*(name for name, _ in self.axes if name != self.names[pp]))

    def parts_of_stage(self) -> Member:
        """Those of them who hold different parts of it."""
        return self.along(*self._named(tp), *self._named(ep))
