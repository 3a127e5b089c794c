"""The optimiser on slices: any element-wise optimiser runs on this rank's part of the flat buffers.

The optimiser is given long flat tensors, one for each stretch of equal options, instead of the parameters; its
state is then sharded as they are. An optimiser that looks at a whole parameter at a time (LAMB, Muon) is given one
tensor for each parameter, of its shape, which needs full parameters: that is stage 0 only.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.job.kept import Common, common, exact, holders, holds_parameters, layers, put_state, state_of
from shoal.job.probe_layouts import attributes_of
from shoal.job.probe_run import needs_closure
from shoal.parallel.data import Bucket

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

LONGEST = 1 << 18
"""Elements of a tensor given to an element-wise optimiser. Its temporaries then stay in the cache and are not given
back to the system after every operation: on 1.7 million elements AdamW's plain kernels take 4.3 ms in place of 10.0."""


@dataclass(frozen=True)
class Stretch:
    """A tensor the optimiser updates: elements [start, stop) of a bucket's buffer."""

    bucket: Bucket
    start: int
    stop: int
    param: nn.Parameter
    first: str
    """Name of the first parameter in it; of the only one, if that stands apart."""


@dataclass(frozen=True)
class Piece:
    """A range of one named parameter, and a tensor of values for just that range."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element, in the parameter laid out flat."""
    values: torch.Tensor


class SavedState(Protocol):
    """What a checkpoint offers of the optimiser, by parameter name."""

    def keys(self, name: str) -> list[str]:
        """The element-wise state it holds for a parameter."""

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of that state, of the parameter laid out flat."""

    def values(self, name: str) -> dict[str, Any]:
        """What else it holds for a parameter: numbers, text, lists, tensors of other shapes."""

    def common(self) -> Common:
        """What it holds for several parameters together."""


def unlike_the_rest(saved: SavedState, names: Iterable[str]) -> frozenset[str]:
    """Parameters whose saved state has a history of its own (another number of steps, or none at all), and those that
    had tensors of their own."""
    kinds = {name: (exact(saved.values(name)), tuple(sorted(saved.keys(name)))) for name in names}
    if not kinds:
        return frozenset()
    usual, _ = Counter(kinds.values()).most_common(1)[0]
    known = frozenset(saved.common().get("slices", {}).get("apart", ()))
    return known | frozenset(name for name, kind in kinds.items() if kind != usual)


class SlicedOptimizer:
    """Builds the optimiser over this rank's slices and maps its state back to named parameters.

    Parameters share a tensor as long as they share a history. One that gets no gradient in some step is skipped
    then, as a serial optimiser skips it, and has to stand `apart` from that step on.
    """

    def __init__(
        self,
        factory: Factory,
        options: Sequence[dict[str, Any]],
        buckets: Sequence[Bucket],
        masters: Sequence[torch.Tensor],
        offsets: Sequence[int],
        *,
        elementwise: bool,
        labels: Mapping[str, int] | None = None,
        apart: frozenset[str] = frozenset(),
    ) -> None:
        """`labels`: the trainable parameters of all ranks in the model's order, and which of the options each has."""
        self.buckets, self.masters, self.offsets = buckets, masters, offsets
        self.elementwise = elementwise
        self.labels = dict(labels or {slot.name: slot.options for b in buckets for slot in b.buffer.slots})
        used = sorted(set(self.labels.values()))
        self.placeholders = self._placeholders(used)
        self.stretches: list[Stretch] = []
        self.apart = apart
        groups = [{"params": params, **options[which]} for which, params in zip(used, self._lay(used), strict=True)]
        groups = [group for group in groups if group["params"]]
        if not groups:
            # A rank whose shard is all padding still steps, on nothing.
            groups = [{"params": [nn.Parameter(masters[0].new_zeros(0) if masters else torch.zeros(0))]}]
        given = {id(param) for group in groups for param in group["params"]}
        self.used = used
        self.optimizer = factory(groups)
        if {id(param) for group in self.optimizer.param_groups for param in group["params"]} != given:
            raise ValueError(
                f"{type(self.optimizer).__name__} does not hold the parameters that it was given: the function "
                "`optimizer` must pass its groups on, as in lambda groups: torch.optim.AdamW(groups, lr=1e-3)"
            )
        _prefer_fused(self.optimizer)
        self._sgd = [each for _, each in layers(self.optimizer) if isinstance(each, torch.optim.SGD)]
        self.needs_closure = needs_closure(self.optimizer)
        for group in self.optimizer.param_groups:
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"] = group["lr"].detach().clone()  # The schedule writes to it: not to the user's own.
        self.base_lrs = [copy.deepcopy(group.get("lr")) for group in self.optimizer.param_groups]
        self._factor = 1.0
        """The schedule's factor in the groups' learning rates."""
        self._fresh = {
            where: {key: exact(value) for key, value in entries.items()}
            for where, entries in common(self.optimizer).items()
        }

    def _placeholders(self, used: list[int]) -> dict[int, nn.Parameter]:
        """For each set of options of which this rank lacks parameters, one without elements: it has a gradient whenever
        one of them has, so that what an optimiser counts for a group or for all is the same on every rank."""
        if not self.elementwise:
            return {}
        held = {slot.name for bucket in self.buckets for slot in bucket.buffer.slots}
        partial = any(bucket.buffer.shards > 1 for bucket in self.buckets) or not held >= self.labels.keys()
        full = {slot.options for bucket in self.buckets for slot in bucket.buffer.slots if slot.shape.numel()}
        like = self.masters[0] if self.masters else torch.zeros(0)
        return {which: nn.Parameter(like.new_zeros(0)) for which in used if partial or which not in full}

    def _lay(self, used: list[int]) -> list[list[nn.Parameter]]:
        """Makes the stretches; gives the parameters for each set of options."""
        self.stretches = []
        params: dict[int, list[tuple[int, nn.Parameter]]] = {which: [] for which in used}
        order = {name: place for place, name in enumerate(self.labels)}
        for bucket, master, offset in zip(self.buckets, self.masters, self.offsets, strict=True):
            slots = bucket.buffer.slots
            if self.elementwise:
                for low, high, which in bucket.buffer.runs(offset, offset + master.numel(), apart=self.apart):
                    for start in range(low, high, LONGEST):
                        stop = min(start + LONGEST, high)
                        param = nn.Parameter(master[start - offset : stop - offset])
                        first = next(slot.name for slot in slots if start < slot.stop)
                        self.stretches.append(Stretch(bucket, start, stop, param, first))
                        params[which].append((0, param))
            else:
                for slot in slots:
                    # Not the model's own: autograd would take an update between forward and backward (which only a
                    # pipeline without flush makes, on other weights) for an accident.
                    param = nn.Parameter(master[slot.start - offset : slot.stop - offset].view(slot.shape))
                    vars(param).update(attributes_of(slot.param))
                    self.stretches.append(Stretch(bucket, slot.start, slot.stop, param, slot.name))
                    params[slot.options].append((order[slot.name], param))
        found = [[param for _, param in sorted(params[which], key=lambda row: row[0])] for which in used]
        for place, which in enumerate(used):
            if which in self.placeholders:
                found[place].append(self.placeholders[which])
        return found

    def regroup(self, apart: frozenset[str]) -> None:
        """Lets these parameters have tensors of their own from now on. The optimiser stays, with all that it keeps."""
        held, before = self.held(), self.stretches
        self.apart = apart
        groups = [params for params in self._lay(self.used) if params]
        for _, each in layers(self.optimizer):
            for stretch in before:
                each.state.pop(stretch.param, None)
            for group, params in zip(each.param_groups, groups, strict=True):
                group["params"] = params
        self._load_states(held)

    def give(self, gradients: dict[int, torch.Tensor], without: frozenset[str] = frozenset()) -> None:
        """`gradients`: by bucket identity, the reduced gradient of this rank's slice (offset as the masters).
        `without`: parameters that have no gradient in this step; all of them stand apart."""
        for stretch in self.stretches:
            if stretch.first in without:
                stretch.param.grad = None
                continue
            offset = 0 if stretch.bucket.zero == 0 else stretch.bucket.buffer.shard.start
            gradient = gradients[id(stretch.bucket)][stretch.start - offset : stretch.stop - offset]
            stretch.param.grad = gradient.view(stretch.param.shape)
        for which, param in self.placeholders.items():
            used = any(label == which and name not in without for name, label in self.labels.items())
            param.grad = torch.zeros_like(param) if used else None

    def step(
        self,
        *,
        gradients: dict[int, torch.Tensor],
        lr_factor: float,
        without: frozenset[str] = frozenset(),
        closure: Callable[[], torch.Tensor] | None = None,
        around: Callable[[], Any] = nullcontext,
    ) -> None:
        """One step with these gradients (see `give`). `closure` computes the loss and the gradients again; `around()`
        is entered for the optimiser's own step."""
        self.give(gradients, without)
        self._apply(lr_factor)
        for each in self._sgd:
            _start_momentum(each)
        if closure is None:
            with around():
                self.optimizer.step()
        else:
            self.optimizer.step(closure)  # type: ignore[arg-type]
        for stretch in self.stretches:
            stretch.param.grad = None

    def _apply(self, lr_factor: float) -> None:
        """Writes learning rates only when the factor changes: between, they are the optimiser's and its schedulers'."""
        if lr_factor == self._factor:
            return
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            if base is None:
                raise ValueError(
                    f"{type(self.optimizer).__name__} has no learning rate ('lr') in its groups, so a schedule cannot "
                    "change it; leave Job.schedule out, or name the optimiser's learning rate 'lr'"
                )
            if isinstance(base, torch.Tensor):
                group["lr"].copy_(base * lr_factor)
            else:
                group["lr"] = base * lr_factor
        self._factor = lr_factor

    def _sized(self, stretch: Stretch, value: Any) -> bool:
        """Whether a value of the state has an element for each one of the parameter's."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        same = value.numel() == stretch.param.numel() if self.elementwise else value.shape == stretch.param.shape
        return same and value.numel() > 0

    def state(self, owned: Callable[[Bucket], tuple[int, int]]) -> Iterator[tuple[str, Piece]]:
        """Element-wise state within the owned range of each bucket, as (state key, piece)."""
        for stretch in self.stretches:
            low, high = owned(stretch.bucket)
            for key, value in state_of(self.optimizer, stretch.param).items():
                if self._sized(stretch, value):
                    for piece in self._pieces(stretch, value.reshape(-1), low, high):
                        yield key, piece

    def values(self) -> dict[str, dict[str, Any]]:
        """All other state, by parameter name and key: numbers (Adam's step), lists, tensors of other shapes."""
        found: dict[str, dict[str, Any]] = {}
        for stretch in self.stretches:
            state = state_of(self.optimizer, stretch.param).items()
            values = {key: value for key, value in state if not self._sized(stretch, value)}
            for piece in self._pieces(stretch, stretch.param.detach().reshape(-1)):
                found[piece.name] = values
        return found

    def common(self) -> Common:
        """What the optimiser keeps for several parameters together and has changed since it was built. Groups are
        called by their options, which are the same on every rank."""
        params = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        found: Common = {}
        adjusted = False
        for where, entries in common(self.optimizer).items():
            for key, value in entries.items():
                if key == "lr" and where.startswith("group "):
                    wanted = self._wanted_lr(int(where.removeprefix("group ")))
                    changed = exact(value) != exact(wanted)
                    adjusted = adjusted or changed
                else:
                    changed = self._fresh[where].get(key) != exact(value)
                if changed and not holds_parameters(value, params):
                    found.setdefault(self._by_options(where), {})[key] = value
        if adjusted:
            found["schedule"] = {"factor": self._factor}
        if self.apart:
            # A fused kernel rounds by where a tensor begins and ends: cut as before, a resumed run is the same.
            found["slices"] = {"apart": sorted(self.apart)}
        return found

    def _wanted_lr(self, place: int) -> Any:
        base = self.base_lrs[place]
        if base is None or self._factor == 1.0:
            return base
        return (base * self._factor).to(base.dtype) if isinstance(base, torch.Tensor) else base * self._factor

    def _by_options(self, where: str, *, back: bool = False) -> str:
        """A group's place in the optimiser, as that of its options; or the other way. A wrapped optimiser with groups
        of its own (one for each matrix) keeps their places."""
        prefix, found, place = where.rpartition("group ")
        mine = [which for which in self.used if self.elementwise or self._holds(which)]
        groups = {each_prefix: len(each.param_groups) for each_prefix, each in layers(self.optimizer)}
        if not found or len(mine) != groups.get(prefix):
            return where
        if back:
            return f"{prefix}group {mine.index(int(place))}" if int(place) in mine else ""
        return f"{prefix}group {mine[int(place)]}"

    def _holds(self, which: int) -> bool:
        return any(slot.options == which for bucket in self.buckets for slot in bucket.buffer.slots)

    def load(self, saved: SavedState) -> None:
        """Fills the state of every slice, however the saved one was sliced, and what they have in common."""
        self._load_states(saved)
        kept = holders(self.optimizer)
        for label, entries in saved.common().items():
            if label == "schedule":
                self._factor = entries["factor"]
                continue
            where = self._by_options(label, back=True)
            if where in kept:  # Not "slices", which decided how this was built.
                kept[where].update({key: self._placed(value) for key, value in entries.items()})

    def _placed(self, value: Any) -> Any:
        """A copy of a saved value; tensors with elements lie where parameters do."""
        if isinstance(value, torch.Tensor):
            device = self.masters[0].device if self.masters and value.dim() else value.device
            return value.detach().clone().to(device)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._placed, value))
        return {key: self._placed(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    def _load_states(self, saved: SavedState) -> None:
        for stretch in self.stretches:
            pieces = list(self._pieces(stretch, stretch.param.detach().reshape(-1)))
            state: dict[str, Any] = {key: self._placed(value) for key, value in saved.values(stretch.first).items()}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not value.dim() and self._is_fused(stretch):
                    state[key] = value.to(stretch.param.device)
            for key in saved.keys(stretch.first):
                flat: torch.Tensor | None = None
                for piece in pieces:
                    at = self._slot_start(stretch, piece.name) + piece.start - stretch.start
                    values = saved.read(piece.name, key, piece.start, piece.start + piece.values.numel())
                    if flat is None:
                        flat = values.new_zeros(stretch.stop - stretch.start, device=stretch.param.device)
                    flat[at : at + piece.values.numel()] = values
                assert flat is not None
                state[key] = flat.view(stretch.param.shape)
            if state:
                put_state(self.optimizer, stretch.param, state)

    def _is_fused(self, stretch: Stretch) -> bool:
        groups = self.optimizer.param_groups
        return any(group.get("fused") and any(p is stretch.param for p in group["params"]) for group in groups)

    def contents(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, Piece]]]]:
        """Each tensor of the optimiser, with the pieces of named parameters in it and where they begin."""
        for stretch in self.stretches:
            pieces = self._pieces(stretch, stretch.param.detach().reshape(-1))
            yield (
                stretch.param,
                [(self._slot_start(stretch, piece.name) + piece.start - stretch.start, piece) for piece in pieces],
            )

    def held(self) -> SavedState:
        """The state as it is now, for another SlicedOptimizer over the same slices to load."""
        return _HeldState(self)

    def _slot_start(self, stretch: Stretch, name: str) -> int:
        return next(slot.start for slot in stretch.bucket.buffer.slots if slot.name == name)

    def _pieces(self, stretch: Stretch, flat: torch.Tensor, low: int = 0, high: int | None = None) -> Iterator[Piece]:
        low, high = max(low, stretch.start), stretch.stop if high is None else min(high, stretch.stop)
        for slot in stretch.bucket.buffer.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                values = flat[start - stretch.start : stop - stretch.start]
                yield Piece(slot.name, tuple(slot.shape), start - slot.start, values)


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """PyTorch's fused SGD takes momentum from all parameters or from none: one that gets its first gradient later than
    others starts from zero, which is the same where nothing is dampened."""
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            ready = [param for param in group["params"] if param.grad is not None]
            late = [param for param in ready if optimizer.state[param].get("momentum_buffer") is None]
            if len(late) < len(ready):
                for param in late:
                    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """One pass over memory where PyTorch has a kernel for it and nothing else was asked for: on 1.7 million elements
    AdamW takes 1.2 ms in place of 4.3. The same arithmetic, in another order of rounding."""
    for group in optimizer.param_groups:
        asked = any(group.get(other) for other in ("foreach", "capturable", "differentiable", "dampening"))
        numbers = [*group.get("betas", ()), group.get("lr")]
        plain = not any(isinstance(number, torch.Tensor) for number in numbers)
        plain = plain and all(p.is_floating_point() for p in group["params"])
        if "fused" in group and group["fused"] is None and not asked and plain:
            group["fused"] = True
            for param in group["params"]:
                for key, value in optimizer.state.get(param, {}).items():
                    # Adagrad counts steps from its construction on, in host memory; fused kernels count on the device.
                    if key == "step" and isinstance(value, torch.Tensor):
                        optimizer.state[param][key] = value.to(param.device)


class _HeldState:
    """A SavedState in memory. Each rank finds in it just the slices it holds."""

    def __init__(self, optimizer: SlicedOptimizer) -> None:
        self._values = optimizer.values()
        self._held: dict[str, dict[str, list[Piece]]] = {}
        for key, piece in optimizer.state(lambda bucket: (0, bucket.buffer.padded)):
            self._held.setdefault(piece.name, {}).setdefault(key, []).append(piece)

    def keys(self, name: str) -> list[str]:
        return list(self._held.get(name, ()))

    def read(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Pieces follow each other without a gap: they are those of one shard."""
        pieces = self._held[name][key]
        low = pieces[0].start
        values = torch.cat([piece.values for piece in pieces]) if len(pieces) > 1 else pieces[0].values
        return values[start - low : stop - low]

    def values(self, name: str) -> dict[str, Any]:
        return self._values.get(name, {})

    def common(self) -> Common:
        return {}
