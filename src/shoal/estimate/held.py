"""What one rank holds of a model: its stages, its parts of tensors, its experts, and every parameter's family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod

from shoal.estimate.placing import Placing, PredictedFamily
from shoal.estimate.traffic import Group
from shoal.layout.cuts import Cut
from shoal.layout.forward import JobShapes, ParameterShape
from shoal.layout.tensor.plan import Region, Vocabulary
from shoal.strategy import Strategy, ep, pp, recompute, tp
from shoal.strategy.schedule import rank_stages, stage_rank

SHARED = -1
"""The part of a parameter that several stages of one rank read."""


class Held:
    """One rank's part of a model."""

    def __init__(self, shapes: JobShapes, strategy: Strategy, rank: int = 0) -> None:
        self.shapes, self.strategy, self.rank = shapes, strategy, rank
        self.placing = Placing(strategy, rank)
        self.recomputes = strategy.term(recompute) is not None
        self.term = strategy.term(pp)
        self.stages: tuple[int, ...] = ()
        """Numbers of the stages that this rank runs."""
        self.ranges: tuple[tuple[int, int], ...] = ()
        """Pieces of every stage of the pipeline."""
        if self.term is not None:
            index, term = self.placing.pipeline.index, self.term
            self.stages = rank_stages(index, term.n, term.chunks, term.schedule)
            self.ranges = shapes.stages[term.n * term.chunks]
        tensor = strategy.term(tp)
        self.between = "whole"
        if tensor is not None:
            self.between = "sequence" if tensor.sequence else "batch" if tensor.batch else "whole"
        self.moments = (1, 1)
        """First and second moments of the optimiser, where islands average them."""
        self._runs: dict[str, bool] = {}
        self._first = {name: each.name for each in shapes.parameters for name in each.names}

    def runs(self, path: str) -> bool:
        """Whether a module computes on this rank."""
        if self.term is None:
            return True
        known = self._runs.get(path)
        if known is None:
            local = (self.shapes.pieces[n].path for stage in self.stages for n in range(*self.ranges[stage]))
            known = self._runs[path] = any(path == piece or path.startswith(piece + ".") for piece in local)
        return known

    def holders(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter; one that nothing reads is the first stage's."""
        if self.term is None:
            return ()
        return self._holders.get(name, (0,))

    @cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for stage, (first, stop) in enumerate(self.ranges):
            for name in frozenset().union(*(piece.parameters for piece in self.shapes.pieces[first:stop])):
                found[name] = (*found.get(name, ()), stage)
        return found

    def _here(self, name: str) -> bool:
        if self.term is None or name not in self._first:
            return True  # A buffer is where the parameters of its region are.
        return bool(set(self.holders(self._first[name])) & set(self.stages))

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Those of tensor parallelism that this rank takes part in."""
        plan = self.shapes.tensor
        if plan is None or self.placing.tensor.ranks == 1:
            return ()
        kept = [region for region in plan.regions if self.between != "batch" or region.kind == "features"]
        return tuple(region for region in kept if all(self._here(name) for name in region.cuts))

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        plan = self.shapes.tensor
        if plan is None or self.placing.tensor.ranks == 1 or self.between == "batch":
            return None
        return plan.vocabulary

    @cached_property
    def tensor_cuts(self) -> dict[str, Cut]:
        """Parameters that tensor parallelism cuts, by their first names."""
        found = {name: cut for region in self.regions for name, cut in region.cuts.items()}
        if self.vocabulary is not None:
            found |= {name: cut for name, cut in self.vocabulary.cuts.items() if self._here(name)}
        return {self._first.get(name, name): cut for name, cut in found.items()}

    @cached_property
    def _expert_names(self) -> dict[str, bool]:
        """Parameters of experts -> whether they hold several experts."""
        if self.placing.experts.ranks == 1:
            return {}
        return {name: layer.stacked for layer in self.shapes.experts for name in layer.parameters}

    def _partial(self, parameter: ParameterShape) -> bool:
        """Whether a parameter is unsharded on each rank of tp, which sees part of its gradient only."""
        if self.placing.tensor.ranks == 1 or self.shapes.tensor is None or parameter.name in self.tensor_cuts:
            return False
        inside = {name for region in self.regions for name in region.partial}
        on_stream = self.between == "sequence" and any(
            name.startswith(block + ".") for name in parameter.names for block in self.shapes.stream
        )
        return self.between == "batch" or on_stream or bool(inside.intersection(parameter.names))

    def family(self, parameter: ParameterShape) -> PredictedFamily:
        name = parameter.name
        stages = self._stage_ranks(name)
        stacked = self._expert_names.get(name, False)
        return PredictedFamily(
            cut=name in self.tensor_cuts and not stacked,
            partial=self._partial(parameter),
            expert=name in self._expert_names,
            stages=stages if len(stages) > 1 else (),
        )

    def _stage_ranks(self, name: str) -> tuple[int, ...]:
        """The ranks along pp that hold a parameter."""
        term = self.term
        if term is None:
            return ()
        return tuple(sorted({stage_rank(stage, term.n, term.chunks, term.schedule) for stage in self.holders(name)}))

    def part(self, name: str) -> int:
        """Which of this rank's stages a parameter belongs to; SHARED if to several, or if it is reduced after all of
        them because other ranks hold it too."""
        if self.term is None:
            return 0
        if len(self.stages) > 1 and len(self._stage_ranks(name)) > 1:
            return SHARED
        mine = [n for n, stage in enumerate(self.stages) if stage in self.holders(name)]
        return mine[0] if len(mine) == 1 else SHARED

    def own(self) -> Iterator[ParameterShape]:
        """The parameters that this rank holds, in the model's order."""
        for each in self.shapes.parameters:
            if self._here(each.name) and self._has_expert(each.name):
                yield each

    def _has_expert(self, name: str) -> bool:
        """Listed experts are on one rank of ep each, in order."""
        if self._expert_names.get(name, True):
            return True
        layer = next(layer for layer in self.shapes.experts if name in layer.parameters)
        key = name.removeprefix(f"{layer.path}." if layer.path else "").split(".")[0]
        share = layer.count // self.placing.experts.ranks
        return layer.members.index(key) // share == self.placing.experts.index

    def shape_of(self, parameter: ParameterShape) -> tuple[int, ...]:
        """Of this rank's part."""
        name, shape = parameter.name, parameter.shape
        cut = self.tensor_cuts.get(name)
        if cut is not None:
            size = cut.local_size(self.placing.tensor.ranks, self.placing.tensor.index)
            shape = (*shape[: cut.dim], size, *shape[cut.dim + 1 :])
        if self._expert_names.get(name, False):
            shape = (shape[0] // self.placing.experts.ranks, *shape[1:])
        return shape

    def cut_across(self, name: str) -> type | None:
        """The axis that cuts a parameter, as a kind of term: tp, or ep for experts in one stack."""
        if self._expert_names.get(name, False):
            return ep
        return tp if name in self.tensor_cuts else None

    def float_numbers(self) -> int:
        """Of floating-point buffers; a rank of a pipeline keeps those of all stages."""
        found, place = 0, self.placing.tensor
        for name, shape in self.shapes.floats.items():
            cut = self.tensor_cuts.get(name)
            if cut is not None:
                shape = (*shape[: cut.dim], cut.local_size(place.ranks, place.index), *shape[cut.dim + 1 :])
            found += prod(shape)
        return found

    def channel_parts(self, path: str) -> int:
        """Among how many ranks the channels of a norm are cut."""
        inside = any(name == path or name.startswith(path + ".") for name in self.tensor_cuts) if path else False
        return self.placing.tensor.ranks if inside else 1

    def holds_buffer(self, name: str) -> bool:
        """Whether a buffer is updated on this rank."""
        if self.term is None:
            return True
        local = {n for stage in self.stages for n in range(*self.ranges[stage])}
        if name in self.shapes.written:
            piece, own = self.shapes.written[name]
            return piece in local if own else piece <= max(local)
        owner = next((n for n, piece in enumerate(self.shapes.pieces) if name.startswith(piece.path + ".")), None)
        return owner is None or owner in local

    def buffer_group(self) -> Group:
        """Ranks that hold the same part of the model and see different samples or positions."""
        place = self.placing
        if place.context.ranks * place.planes.ranks == 1:
            return place.samples.group
        return place.along(*place.samples_axes, *place.levels, place.context.group.axis, place.planes.group.axis).group
