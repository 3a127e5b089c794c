"""Where this rank stands: which ranks share its batch, its parameters, and the sums of a step.

Every parameter belongs to a family. The gradient of a family is summed over the axes along which its members see
different data and hold the same parameter: data and context for all of them, experts for what is no expert, tensor
for what is unsharded but sees only part of the tokens, and the stages that share a tied weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.comm.mesh import Members, Mesh
from shoal.strategy import Strategy, allreduce, cp, dp, ep, none, offload, pp, shared, spatial, tp
from shoal.strategy.islands import is_loose
from shoal.strategy.seats import seats_of
from shoal.strategy.terms.sync import hogwild


@dataclass(frozen=True)
class Route:
    """How gradients are reduced where one dp level compresses them: dense inside that level, where links are fast,
    compressed across it, dense outside it."""

    inside: Members
    """Excludes the sharding group, which is reduced separately."""
    between: Members
    outside: Members
    whole: bool
    """Whether the level also shards: full gradients are compressed then, and each rank keeps its shard of the sum."""


@dataclass(frozen=True)
class Replicas:
    """The ranks whose gradients of a family are summed, and how they share the work of it."""

    everyone: Members
    """All ranks that hold the same parameters and see different data."""
    sharding: Members
    """Those that also hold different shards; one rank when nothing is sharded."""
    copies: Members
    """Those that hold the same shard of different data."""
    route: Route | None = None
    """Where a level of dp compresses."""


@dataclass(frozen=True, slots=True)
class Family:
    """What parameters have in common that are reduced together."""

    cut: bool = False
    """Each rank of tp holds a part."""
    partial: bool = False
    """Unsharded on each rank of tp, which sees part of the tokens only."""
    expert: bool = False
    """Each rank of ep holds experts of its own."""
    stages: tuple[int, ...] = ()
    """Ranks along pp that hold it, where there are several (a tied weight)."""


class Placement:
    """The groups of ranks that a strategy makes of a mesh."""

    def __init__(self, strategy: Strategy, mesh: Mesh, *, batch_over_tp: bool = False) -> None:
        self.mesh = mesh
        levels = [(axis.name, axis.term) for axis in strategy.axes if isinstance(axis.term, dp)]
        loose = [name for name, level in levels if is_loose(level)]
        self.levels = [name for name, level in levels if name not in loose]
        """Levels of dp inside an island, whose replicas step together."""
        self.seats = seats_of(strategy)
        """Where a level has parameter servers."""
        self.summed = [name for name in self.levels if self.seats is None or name != self.seats.axis]
        """Those of them whose gradients are summed by collectives."""
        sharded = [axis for axis in strategy.axes if axis.name in self.levels and axis.term.zero]  # type: ignore[attr-defined]
        self.zero: int = sharded[0].term.zero if sharded else 0  # type: ignore[attr-defined]
        self.sharded = sharded[0].name if sharded else None
        if not sharded and any(term.what == "parameters" for term in strategy.all_of(offload)):
            self.zero = 3  # Blocks come and go, though no other rank holds parts of them.
        together = [axis.name for axis in strategy.axes if axis.name in self.levels and axis.term.via == shared()]  # type: ignore[attr-defined]
        self.shared_memory = bool(together)
        """Whether the replicas of one level share memory. Each then updates its slice, as at stage 1 of ZeRO."""
        if together:
            self.zero, self.sharded = 1, together[0]
        elif self.seats is not None and self.summed and not sharded:
            self.zero, self.sharded = 1, self.summed[-1]  # Each rank pushes and pulls a slice of its own.
        compressing = [
            axis.name
            for axis in strategy.axes
            if axis.name in self.summed and axis.size > 1 and not isinstance(axis.term.compress, none)  # type: ignore[attr-defined]
        ]
        self.compressing = compressing[0] if compressing else None
        self.pipeline = self._axis(strategy, pp)
        self.tensor = self._axis(strategy, tp)
        self.context = self._axis(strategy, cp)
        self.experts = self._axis(strategy, ep)
        self.planes = self._axis(strategy, spatial)
        data = mesh.along(*self.levels, label="dp")
        every = [axis.name for axis in strategy.axes]
        inside = [name for name in every if name not in loose]
        sampling = [*self.levels, *self._names(self.experts), *(self._names(self.tensor) if batch_over_tp else ())]
        self.sampling = tuple(sampling)
        self.samples = data if sampling == self.levels else mesh.along(*sampling)
        """The ranks of an island that split its samples: they share statistics of a batch, and a loss over it."""
        self.plane_statistics: Members | None = None
        """The ranks that share statistics of planes, once `share_statistics` has made their group."""
        self.split = mesh.places_along(*loose, *sampling)
        """The ranks that split the global batch, of all islands."""
        label = "island" if loose else "world"
        self.island = data if set(inside) == set(self.levels) else mesh.along(*inside, label=label)
        """The ranks that step together: they all-reduce the loss, the count and the stop flag."""
        self.islands = mesh.along(*loose)
        """The ranks that hold the same part of the model in each island."""
        self.near = mesh.along(loose[-1]) if len(loose) > 1 else None
        """Of these, where two levels are loose, those that the inner one ties together."""
        racing = any(isinstance(level.sync, hogwild) for _, level in levels)
        self.hogwild = self.islands if racing else None
        """The ranks at the start that update one copy of the parameters without locks."""
        self.world = mesh.along(*every, label="world") if loose else self.island
        """All ranks."""
        self.survivors: Members | None = None
        """The ranks that are left, once some were lost."""
        self.batch_over_tp = batch_over_tp
        cuts = [self.sharded] if self.sharded else []
        cuts += [name for axis in (self.pipeline, self.tensor, self.experts) for name in self._names(axis)]
        self.norm = mesh.along(*cuts)
        """Those that hold different parts of the model: the squares of their gradients add up."""
        self._known: dict[Family, Replicas] = {}
        self._tied: dict[tuple[int, ...], Members] = {}

    def _axis(self, strategy: Strategy, cls: type) -> Members:
        term = strategy.term(cls)
        if term is None:
            return Members("none", (self.mesh.rank,), 0, None)
        name = next(axis.name for axis in strategy.axes if axis.term is term)
        return self.mesh.along(name)

    def _names(self, members: Members) -> tuple[str, ...]:
        return () if members.axis == "none" else (members.axis,)

    def share_statistics(self, *, samples: bool) -> None:
        """Makes the group whose ranks share statistics of planes; `samples`: over all of an island. Collective."""
        self.plane_statistics = self.mesh.along(*(self.sampling if samples else ()), *self._names(self.planes))

    @property
    def first_of_sample(self) -> bool:
        """Whether this rank speaks for all that hold parts of the same samples."""
        return self.context.index == 0 and self.planes.index == 0

    @property
    def first_of_tensor(self) -> bool:
        return self.tensor.index == 0

    def over(self, family: Family) -> list[str]:
        """The axes over which a family's gradients are summed."""
        names = [*self.summed, *self._names(self.context), *self._names(self.planes)]
        if not family.expert:
            names += self._names(self.experts)
        if family.partial:
            names += self._names(self.tensor)
        return names

    def replicas(self, family: Family) -> Replicas:
        """Collective: every rank asks for the same families in the same order."""
        if family not in self._known:
            self._known[family] = self._make(family)
        return self._known[family]

    def _make(self, family: Family) -> Replicas:
        over = self.over(family)
        label = "dp" if set(over) == set(self.summed) else None
        route = self._route(over, family)
        if not self.zero:
            everyone = self._members(over, family.stages, label)
            return Replicas(everyone, Members("dp", (self.mesh.rank,), 0, None), everyone, route=route)
        rest = [name for name in over if name != self.sharded]
        alone = Members("dp", (self.mesh.rank,), 0, None)
        return Replicas(
            self.mesh.along(*over, label=label),
            alone if self.sharded is None else self.mesh.along(self.sharded),
            self._members(rest, family.stages, None),
            route,
        )

    def _route(self, over: Sequence[str], family: Family) -> Route | None:
        if self.compressing is None:
            return None
        outside = self.summed[: self.summed.index(self.compressing)]
        inside = [name for name in over if name not in (*outside, self.compressing, self.sharded)]
        return Route(
            self._members(inside, family.stages, None),
            self.mesh.along(self.compressing),
            self.mesh.along(*outside),
            self.compressing == self.sharded,
        )

    def _members(self, names: Sequence[str], stages: tuple[int, ...], label: str | None) -> Members:
        if len(stages) < 2:
            return self.mesh.along(*names, label=label)
        return self.mesh.among(names, self.pipeline.axis, stages)

    def cutting(self, stack: bool) -> Members:
        """The ranks that hold parts of a cut parameter; `stack`: of one that holds several experts."""
        return self.experts if stack else self.tensor

    def pieces(self, across: Members | None) -> Members:
        """The ranks that hold pieces of the same parameter: those that shard it, and those `across` which it is cut.
        Collective."""
        names = [self.sharded] if self.sharded else []
        return self.mesh.along(*names, *(self._names(across) if across is not None else ()))

    def lose(self, ranks: Sequence[int]) -> None:
        """Goes on without islands that were lost: the others split the batch and exchange among themselves. Collective
        among those that are left."""
        same = self.world is self.islands
        self.islands = self.mesh.without(self.islands, ranks)
        self.world = self.survivors = self.islands if same else self.mesh.without(self.world, ranks)
        left = tuple(rank for rank in self.split.ranks if rank not in ranks)
        self.split = Members(self.split.axis, left, left.index(self.mesh.rank), None)

    def multiplicity(self, family: Family) -> int:
        """How many ranks of `norm` hold the same gradient of a family after reduction."""
        times = max(1, len(family.stages))
        if not family.cut:
            times *= self.tensor.size
        if not family.expert:
            times *= self.experts.size
        return times

    def writes(self, family: Family) -> bool:
        """Whether this rank is the one, of those along tp that hold the same, to write it to a checkpoint."""
        return family.cut or family.partial or self.first_of_tensor


def mesh_of(
    strategy: Strategy, *, rank: int, backend: str | None, announce: Callable[[Sequence[int]], None] | None = None
) -> Mesh:
    """The ranks of a strategy, with the all-reduce that its levels of dp name. `announce` is called on the first rank
    with the ranks of every group before it is made, where ranks outside of the mesh have to take part in that."""
    named = {
        axis.name: axis.term.via.algorithm
        for axis in strategy.axes
        if isinstance(axis.term, dp) and isinstance(axis.term.via, allreduce) and axis.term.via.algorithm != "auto"
    }
    axes = [(axis.name, axis.size) for axis in strategy.axes]
    return Mesh(axes, rank=rank, backend=backend, algorithms=named, announce=announce)
