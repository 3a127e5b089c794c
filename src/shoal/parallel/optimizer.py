"""The optimiser on slices: any element-wise optimiser runs on this rank's part of the flat buffers.

The optimiser is given long flat tensors, one for each stretch of equal options, instead of the parameters; its
state is then sharded as they are. An optimiser that looks at a full parameter at a time (LAMB, Muon) is given one
tensor for each parameter, of its shape: where ranks hold pieces, one of them has the full one (`full_parameters.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from shoal.job.kept import Common, common, exact, holders, holds_parameters, layers, put_state, state_of
from shoal.job.probe_layouts import attributes_of
from shoal.job.probe_run import needs_closure
from shoal.parallel.bucket import Bucket
from shoal.parallel.flat_slice import FlatSlice, HeldState, OwnedSlice, Piece, SavedState
from shoal.parallel.full_parameters import FullParameters
from shoal.parallel.fused import prefer_fused, start_momentum
from shoal.parallel.learning_rates import LearningRates
from shoal.parallel.offload.state import OffloadedState

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

LONGEST = 1 << 18
"""Elements of a tensor given to an element-wise optimiser. Its temporaries then stay in the cache and are not given
back to the system after every operation: on 1.7 million elements AdamW's plain kernels take 4.3 ms in place of 10.0."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the optimiser of a run is built."""

    factory: Factory
    options: Sequence[dict[str, Any]]
    """The different sets of options that parameters have."""
    labels: Mapping[str, int]
    """The trainable parameters of all ranks in the model's order, and which of the options each has."""
    elementwise: bool
    """Whether it may be given slices of parameters."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of all parameters, as the model was built."""


class SlicedOptimizer:
    """Builds the optimiser over this rank's slices and maps its state back to named parameters.

    Parameters are fused into one optimiser tensor while their step counts agree. One that gets no gradient in some
    step is skipped then, as a serial optimiser skips it, and is `unfused` from that step on.
    """

    def __init__(
        self,
        recipe: Recipe,
        buckets: Sequence[Bucket],
        *,
        full: FullParameters | None = None,
        unfused: frozenset[str] = frozenset(),
        offloaded: OffloadedState | None = None,
    ) -> None:
        """`full`: the parameters that this rank updates for others, for an optimiser that is not element-wise;
        `offloaded`: where the state waits between steps, if not in memory."""
        self.offloaded = offloaded
        self.longest = LONGEST if offloaded is None else min(LONGEST, offloaded.elements)
        self.buckets, self.elementwise, self.labels, self.full = buckets, recipe.elementwise, recipe.labels, full
        used = sorted(set(self.labels.values()))
        self.placeholders = self._placeholders(used)
        self.slices: list[FlatSlice | OwnedSlice] = []
        self._missing = self._lacking(recipe.shapes)
        self.unfused = unfused
        options = recipe.options
        groups = [{"params": params, **options[which]} for which, params in zip(used, self._lay(used), strict=True)]
        groups = [group for group in groups if group["params"]]
        if not groups:
            # A rank without parameters still steps, on nothing.
            groups = [{"params": [nn.Parameter(self._like.new_zeros(0))]}]
        given = {id(param) for group in groups for param in group["params"]}
        self.used = used
        self.optimizer = recipe.factory(groups)
        if {id(param) for group in self.optimizer.param_groups for param in group["params"]} != given:
            raise ValueError(
                f"{type(self.optimizer).__name__} does not hold the parameters that it was given: the function "
                "`optimizer` must pass its groups on, as in lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
            )
        prefer_fused(self.optimizer)
        self._sgd = [each for _, each in layers(self.optimizer) if isinstance(each, torch.optim.SGD)]
        self.needs_closure = needs_closure(self.optimizer)
        self.rates = LearningRates(self.optimizer)
        if offloaded is not None:
            offloaded.lay(self.slices)
            for number in range(len(offloaded.parts)):
                offloaded.take_over(number, self.optimizer)  # Some make their state at once.
        self._fresh = {
            where: {key: exact(value) for key, value in entries.items()}
            for where, entries in common(self.optimizer).items()
        }

    @property
    def _like(self) -> torch.Tensor:
        """A tensor of the device and the type of parameters."""
        return self.buckets[0].master if self.buckets else torch.zeros(0)

    def _placeholders(self, used: list[int]) -> dict[int, nn.Parameter]:
        """For each set of options of which this rank lacks parameters, one without elements: it has a gradient whenever
        one of them has, so that what an optimiser counts for a group or for all is the same on every rank."""
        if not self.elementwise:
            return {}
        held = {slot.name for bucket in self.buckets for slot in bucket.buffer.slots}
        partial = any(bucket.buffer.shards > 1 for bucket in self.buckets) or not held >= self.labels.keys()
        full = {slot.options for bucket in self.buckets for slot in bucket.buffer.slots if slot.shape.numel()}
        return {which: nn.Parameter(self._like.new_zeros(0)) for which in used if partial or which not in full}

    def _lacking(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, list[nn.Parameter]]:
        """For an optimiser of full parameters: of every set of options and number of dimensions that this rank has no
        parameter of, the smallest, without values and never with a gradient. The job's function `optimizer` then finds
        what it expects (matrices for Muon, the rest for AdamW) on every rank."""
        if self.elementwise:
            return {}
        mine = self._names()
        kinds: dict[tuple[int, int], list[str]] = {}
        for name, which in self.labels.items():
            kinds.setdefault((which, len(shapes.get(name, ()))), []).append(name)
        found: dict[int, list[nn.Parameter]] = {}
        for (which, _), names in kinds.items():
            if not mine.intersection(names) and all(name in shapes for name in names):
                shape = min((shapes[name] for name in names), key=prod)
                found.setdefault(which, []).append(nn.Parameter(self._like.new_zeros(shape)))
        return found

    def _names(self) -> set[str]:
        """Parameters that this rank updates, where the optimiser has full ones."""
        spread = self.full.names if self.full is not None else frozenset()
        owned = self.full.owned if self.full is not None else {}
        slots = (slot.name for bucket in self.buckets for slot in bucket.buffer.slots)
        return {name for name in slots if name not in spread or name in owned}

    def _lay(self, used: list[int]) -> list[list[nn.Parameter]]:
        """Makes the slices; gives the parameters for each set of options."""
        self.slices = []
        params: dict[int, list[tuple[int, nn.Parameter]]] = {which: [] for which in used}
        order = {name: place for place, name in enumerate(self.labels)}
        for bucket in self.buckets:
            master, offset, slots = bucket.master, bucket.offset, bucket.buffer.slots
            if self.elementwise:
                for low, high, which in bucket.buffer.runs(offset, offset + master.numel(), unfused=self.unfused):
                    for start in range(low, high, self.longest):
                        stop = min(start + self.longest, high)
                        param = nn.Parameter(master[start - offset : stop - offset])
                        first = next(slot.name for slot in slots if start < slot.stop)
                        self.slices.append(FlatSlice(bucket, start, stop, param, first))
                        params[which].append((0, param))
            else:
                for slot in slots:
                    if self.full is not None and slot.name in self.full.names:
                        if slot.name in self.full.owned:
                            self.slices.append(self.full.owned[slot.name])
                            params[slot.options].append((order[slot.name], self.slices[-1].param))
                        continue
                    # Not the model's own: autograd would take an update between forward and backward (which only a
                    # pipeline without flush makes, on other weights) for an accident.
                    param = nn.Parameter(master[slot.start - offset : slot.stop - offset].view(slot.shape))
                    vars(param).update(attributes_of(slot.param))
                    self.slices.append(FlatSlice(bucket, slot.start, slot.stop, param, slot.name))
                    params[slot.options].append((order[slot.name], param))
        found = [[param for _, param in sorted(params[which], key=lambda row: row[0])] for which in used]
        for place, which in enumerate(used):
            if which in self.placeholders:
                found[place].append(self.placeholders[which])
            found[place] += self._missing.get(which, ())
        return found

    def replace_optimizer(self, same: torch.optim.Optimizer) -> None:
        """Another object with the contents of the optimiser takes its place."""
        before, self.optimizer, self.rates.optimizer = self.optimizer, same, same
        self._sgd = [same if each is before else each for each in self._sgd]  # type: ignore[misc]

    def regroup(self, unfused: frozenset[str]) -> None:
        """Lets these parameters have tensors of their own from now on. The optimiser stays, with all that it keeps."""
        held, before = self.held(), self.slices  # Held where it waits, if it is offloaded.
        self.unfused = unfused
        groups = [params for params in self._lay(self.used) if params]
        for _, each in layers(self.optimizer):
            for part in before:
                each.state.pop(part.param, None)
            for group, params in zip(each.param_groups, groups, strict=True):
                group["params"] = params
        if self.offloaded is not None:
            self.offloaded.lay(self.slices)
        self._load_states(held)

    def give(self, without: frozenset[str] = frozenset()) -> None:
        """Hands the optimiser the reduced gradients, as they lie in the buckets. `without`: parameters that have no
        gradient in this step; all of them are unfused."""
        reduced = {id(bucket): bucket.reduced() for bucket in self.buckets}
        if self.full is not None:
            self.full.collect()
        for part in self.slices:
            if part.first in without:
                part.param.grad = None
            else:
                part.take_gradient(reduced[id(part.bucket)])
        for which, param in self.placeholders.items():
            used = any(label == which and name not in without for name, label in self.labels.items())
            param.grad = torch.zeros_like(param) if used else None

    def step(
        self,
        *,
        lr_factor: float,
        without: frozenset[str] = frozenset(),
        closure: Callable[[], torch.Tensor] | None = None,
        around: Callable[[], Any] = nullcontext,
    ) -> None:
        """One step with the reduced gradients (see `give`). `closure` computes the loss and the gradients again;
        `around()` is entered for the optimiser's own step."""
        self.give(without)
        self.rates.apply(lr_factor)
        if self.offloaded is not None:
            self.offloaded.step(self, self._update)
        elif closure is None:
            with around():
                self._update()
        else:
            for each in self._sgd:
                start_momentum(each)
            self.optimizer.step(closure)  # type: ignore[arg-type]
        for part in self.slices:
            part.param.grad = None
        if self.full is not None:
            self.full.send_back()

    def _update(self) -> None:
        for each in self._sgd:
            start_momentum(each)
        self.optimizer.step()

    @contextmanager
    def only(self, slices: Sequence[FlatSlice | OwnedSlice]) -> Iterator[None]:
        """The optimiser sees these slices only, where it is known to do without the others; elsewhere they are those
        that have a gradient."""
        if not type(self.optimizer).__module__.startswith("torch.optim."):
            yield
            return
        before = [group["params"] for group in self.optimizer.param_groups]
        chosen = {id(each.param) for each in slices} | {id(param) for param in self.placeholders.values()}
        for group, params in zip(self.optimizer.param_groups, before, strict=True):
            group["params"] = [param for param in params if id(param) in chosen]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, before, strict=True):
                group["params"] = params

    def settle(self) -> None:
        """State that is offloaded has arrived where it waits."""
        if self.offloaded is not None:
            self.offloaded.settle()

    def _sized(self, part: FlatSlice | OwnedSlice, value: Any) -> bool:
        """Whether a value of the state has an element for each one of the parameter's."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        same = value.numel() == part.param.numel() if self.elementwise else value.shape == part.param.shape
        return same and value.numel() > 0

    def state(self, owned: Callable[[Bucket], tuple[int, int]]) -> Iterator[tuple[str, Piece]]:
        """Element-wise state within the owned range of each bucket, as (state key, piece)."""
        self.settle()
        for part in self.slices:
            low, high = owned(part.bucket)
            for key, value in state_of(self.optimizer, part.param).items():
                if self._sized(part, value):
                    for piece in part.pieces(value.reshape(-1), low, high):
                        yield key, piece

    def values(self, owned: Callable[[Bucket], tuple[int, int]] | None = None) -> dict[str, dict[str, Any]]:
        """All other state, by parameter name and key: numbers (Adam's step), lists, tensors of other shapes. With
        `owned`, of parameters whose first element is in that range of their bucket, so that one rank gives them."""
        self.settle()
        found: dict[str, dict[str, Any]] = {}
        for part in self.slices:
            state = state_of(self.optimizer, part.param).items()
            values = {key: value for key, value in state if not self._sized(part, value)}
            for piece in part.pieces(None, *(owned(part.bucket) if owned is not None else ())):
                if owned is None or piece.start == 0:
                    found[piece.name] = values
        return found

    def common(self) -> Common:
        """What the optimiser keeps for several parameters together and has changed since it was built. Groups are
        called by their options, which are the same on every rank."""
        params = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        found: Common = {}
        adjusted = False
        for where, entries in common(self.optimizer).items():
            if self._only_missing(where):
                continue
            for key, value in entries.items():
                if key == "lr" and where.startswith("group "):
                    wanted = self.rates.wanted(int(where.removeprefix("group ")))
                    changed = exact(value) != exact(wanted)
                    adjusted = adjusted or changed
                else:
                    changed = self._fresh[where].get(key) != exact(value)
                if changed and not holds_parameters(value, params):
                    found.setdefault(self._by_options(where), {})[key] = value
        if adjusted:
            found["schedule"] = {"factor": self.rates.factor}
        if self.unfused:
            # A fused kernel rounds by where a tensor begins and ends: cut as before, a resumed run is the same.
            found["slices"] = {"apart": sorted(self.unfused)}
        return found

    def _only_missing(self, where: str) -> bool:
        """Whether a group has none of this rank's parameters."""
        prefix, found, place = where.rpartition("group ")
        each = dict(layers(self.optimizer)).get(prefix)
        if not found or each is None or self.elementwise:
            return False
        missing = {id(param) for params in self._missing.values() for param in params}
        return all(id(param) in missing for param in each.param_groups[int(place)]["params"])

    def _by_options(self, where: str, *, back: bool = False) -> str:
        """A group's place in the optimiser, as that of its options; or the other way. A wrapped optimiser with groups
        of its own (one for each matrix) keeps their places."""
        prefix, found, place = where.rpartition("group ")
        mine = self.used
        groups = {each_prefix: len(each.param_groups) for each_prefix, each in layers(self.optimizer)}
        if not found or len(mine) != groups.get(prefix):
            return where
        if back:
            return f"{prefix}group {mine.index(int(place))}" if int(place) in mine else ""
        return f"{prefix}group {mine[int(place)]}"

    def load(self, saved: SavedState) -> None:
        """Fills the state of every slice, however the saved one was sliced, and what they have in common."""
        self._load_states(saved)
        kept = holders(self.optimizer)
        for label, entries in saved.common().items():
            if label == "schedule":
                self.rates.factor = entries["factor"]
                continue
            where = self._by_options(label, back=True)
            if where in kept:  # Not "slices", which decided how this was built.
                kept[where].update({key: self._placed(value) for key, value in entries.items()})

    def _placed(self, value: Any) -> Any:
        """A copy of a saved value; tensors with elements lie where parameters do."""
        if isinstance(value, torch.Tensor):
            device = self._like.device if self.buckets and value.dim() else value.device
            return value.detach().clone().to(device)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._placed, value))
        return {key: self._placed(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    def _load_states(self, saved: SavedState) -> None:
        if self.offloaded is None:
            for part in self.slices:
                self._load_state(part, saved)
            return
        for number, together in enumerate(self.offloaded.parts):
            for part in together.slices:
                self._load_state(part, saved)
            self.offloaded.take_over(number, self.optimizer)

    def _load_state(self, part: FlatSlice | OwnedSlice, saved: SavedState) -> None:
        pieces = list(part.pieces())
        state: dict[str, Any] = {key: self._placed(value) for key, value in saved.values(part.first).items()}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not value.dim() and self._is_fused(part):
                state[key] = value.to(part.param.device)
        for key in saved.keys(part.first):
            flat: torch.Tensor | None = None
            for piece in pieces:
                at = part.place_of(piece)
                values = part.read(saved, key, piece)
                if flat is None:
                    flat = values.new_zeros(part.size, device=part.param.device)
                flat[at : at + piece.values.numel()] = values
            assert flat is not None
            state[key] = flat.view(part.param.shape)
        if state:
            put_state(self.optimizer, part.param, state)

    def _is_fused(self, part: FlatSlice | OwnedSlice) -> bool:
        groups = self.optimizer.param_groups
        return any(group.get("fused") and any(p is part.param for p in group["params"]) for group in groups)

    def contents(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, Piece]]]]:
        """Each tensor of the optimiser, with the pieces of named parameters in it and where they begin."""
        for part in self.slices:
            pieces = part.pieces()
            yield (
                part.param,
                [(part.place_of(piece), piece) for piece in pieces],
            )

    def held(self) -> SavedState:
        """The state as it is now, for another SlicedOptimizer over the same slices to load."""
        return HeldState(self.values(), self.state(lambda bucket: (0, bucket.buffer.padded)))
