"""One stage of a model: the model's own forward, with the pieces of other stages left out.

Nothing of the user's model is rewritten or traced into a graph. Each stage calls the whole forward: pieces before the
stage hand something of the right shape through, the stage's first piece gets what the stage before sent in place of
it, and the first piece behind the stage ends the forward. What lies between pieces and depends on no parameter (masks,
rotary tables, positions) is thus computed by the model's own code, where it is needed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import swap_tensors
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shoal.parallel.pipeline.arrival import Arrival
from shoal.workload.chain import Chain
from shoal.workload.experts.rehearsal import random_state, set_random_state
from shoal.workload.held_state import results_held
from shoal.workload.wires import Place, Wire

Range = tuple[int, int]

LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake raises when it is asked for a value."""


class StageDone(BaseException):
    """Ends a forward where the next stage begins. Not an Exception: the model's code must not catch it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


class StagedModel:
    """A model of which this rank runs some stages."""

    def __init__(self, model: nn.Module, chain: Chain, stages: Sequence[Range], mine: Sequence[int]) -> None:
        self.model, self.chain, self.stages, self.mine = model, chain, list(stages), list(mine)
        _without_nested_tensors(model)
        self._skeleton = _skeleton(model)
        self.held = [name for name, _ in model.named_parameters() if self._holders(name) & set(mine)]
        self.absent = self._drop()
        self._now: Range = (0, len(chain.links))
        self._begun = self._running = False
        self._calls: Counter[int] = Counter()
        self._filled: dict[Place, torch.Tensor] = {}
        """What was received of the results of pieces before the stage."""
        self._kept: dict[Place, torch.Tensor] = {}
        """Results that are to be sent on."""
        self._given: list[tuple[Wire, torch.Tensor]] = []
        """What was received of the first piece's arguments, where no piece before gave it."""
        self._shapes: dict[Any, Any] = {}
        borders = [chain.links[stop] for _, stop in stages if stop < len(chain.links)]
        self._wanted = {wire.results[0] for link in borders for wire in link.wires if not wire.arguments}

    def install(self) -> None:
        """Wraps the pieces, outside of whatever else wraps them."""
        for number, link in enumerate(self.chain.links):
            module = self.model.get_submodule(link.path)
            module.forward = partial(self._forward, number, module.forward)  # type: ignore[method-assign]
            module.register_forward_pre_hook(partial(self._before, number), prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(self._after, number))

        for path in self.chain.uncalled:
            self.model.get_submodule(path).register_forward_pre_hook(partial(_unexpected, path))

    def _holders(self, name: str) -> set[int]:
        """The stages that hold a parameter. One that nothing reads is the first stage's."""
        found = {
            stage
            for stage, (first, stop) in enumerate(self.stages)
            if any(name in link.parameters for link in self.chain.links[first:stop])
        }
        return found or {0}

    def runs(self, path: str) -> bool:
        """Whether a module lies in one of this rank's stages."""
        local = (self.chain.links[n].path for stage in self.mine for n in range(*self.stages[stage]))
        return any(path == piece or path.startswith(piece + ".") for piece in local)

    def holders(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(self._holders(name)))

    def _drop(self) -> frozenset[str]:
        """Lets go of what belongs to other stages: a zero of the same shape takes its place, without memory."""
        held, gone = set(self.held), {}
        absent = set()
        for name, param in self.model.named_parameters():
            if name not in held:
                nothing = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
                gone[id(param)] = nn.Parameter(nothing, requires_grad=False)
                absent.add(name)
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in gone:
                    module._parameters[name] = gone[id(param)]
        local = {n for stage in self.mine for n in range(*self.stages[stage])}
        for number, link in enumerate(self.chain.links):
            if number not in local:
                names = self.model.get_submodule(link.path).named_buffers()
                absent |= {f"{link.path}.{name}" for name, _ in names}
        for name, change in self.chain.written.items():
            made_here = change.piece in local if change.own else change.piece <= max(local)
            absent |= set() if made_here else {name}
        return frozenset(absent)

    @contextmanager
    def at(self, stage: int, received: Sequence[Arrival]) -> Iterator[None]:
        """While pieces are called for a stage: in its forward, and in a backward that repeats parts of it."""
        first, _ = self._now = self.stages[stage]
        self._begun, self._running, self._calls = False, True, Counter()
        self._filled, self._given = {}, []
        for wire, arrival in zip(self.chain.links[first].wires if first else (), received, strict=True):
            tensor = arrival.enter()
            self._filled |= dict.fromkeys(wire.results, tensor)
            if not wire.results:
                self._given.append((wire, tensor))
        self._kept = dict(self._filled)
        try:
            yield
        finally:
            self._filled, self._kept, self._given = {}, {}, []
            self._running, self._now = False, (0, len(self.chain.links))

    def run(
        self, stage: int, call: Callable[[], Any], received: Sequence[Arrival]
    ) -> tuple[Any, list[torch.Tensor]]:
        """The stage's part of a forward: (what the model gave back, if it is the last stage; what goes on)."""
        first, stop = self.stages[stage]
        elsewhere = self._written_elsewhere(stage)
        with self.at(stage, received):
            try:
                result = call()
                self._require_called(first)
                if stop < len(self.chain.links):
                    raise Branched(self._was_called(stop, "was not called"))
                return result, []
            except StageDone as done:
                self._require_called(first)
                return None, done.tensors
            finally:
                with torch.no_grad():
                    for buffer, before in elsewhere:
                        buffer.copy_(before)

    def _require_called(self, first: int) -> None:
        if first and not self._begun:
            raise Branched(self._was_called(first, "was not called"))

    def _was_called(self, piece: int, what: str) -> str:
        return (
            f"{self.chain.links[piece].path} begins a stage, but for this micro-batch it {what}: the model branches on "
            "its data, which stages on other ranks cannot follow; put the branch inside one block, or leave pp out"
        )

    def _crossing(self, number: int, leaves: list[Any]) -> list[torch.Tensor]:
        """What goes on to the next stage, which must be what was found when the model was cut."""
        wires = self.chain.links[number].wires
        sent = [_at(leaves, w.arguments[0]) if w.arguments else self._kept.get(w.results[0]) for w in wires]
        absent = sum(not isinstance(x, torch.Tensor) for x in sent)
        if absent:
            found = f"is given {len(sent) - absent} of the {len(sent)} tensors that crossed to it"
            raise Branched(self._was_called(number, found))
        known = {id(x) for x in sent}
        learned = [x for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None and id(x) not in known]
        if learned:
            found = f"is given {len(sent) + len(learned)} tensors instead of {len(sent)}"
            raise Branched(self._was_called(number, found))
        return sent

    def _written_elsewhere(self, stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Buffers that the code between pieces changes, and whose change belongs to another stage; as they are now."""
        first, stop = self.stages[stage]
        if not self.model.training:
            return []
        own = {name: change.piece for name, change in self.chain.written.items() if change.own}
        others = [name for name, piece in own.items() if not first <= piece < stop]
        return [(buffer, buffer.clone()) for buffer in map(self.model.get_buffer, others)]

    def _before(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """At the stage's borders: ends the forward, or puts in what the stage before sent."""
        first, stop = self._now
        if number == stop:
            raise StageDone(self._crossing(number, tree_leaves((args, kwargs))))
        if number == first and first and not self._begun:
            self._begun = True  # A piece that runs several times gets what was sent the first time.
            leaves = tree_leaves((args, kwargs))
            for wire, tensor in self._given:
                _become(leaves[wire.arguments[0]], tensor)
            self._given = []

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls[number] += 1
        if number >= self._now[0]:
            return forward(*args, **kwargs)
        return self._placeholder(number, args, kwargs)

    def _after(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind the hooks of the model, which may have changed what the piece gave back."""
        if not self._running:
            return None
        call = self._calls[number] - 1
        if number < self._now[0]:
            return self._fill(number, call, output)
        if any(place[:2] == (number, call) for place in self._wanted):
            leaves = enumerate(tree_leaves(output))
            self._kept |= {(number, call, leaf): t for leaf, t in leaves if (number, call, leaf) in self._wanted}
        return None

    def _fill(self, number: int, call: int, output: Any) -> Any:
        """An output with what was received of it in its places."""
        filled = {leaf: t for (piece, which, leaf), t in self._filled.items() if (piece, which) == (number, call)}
        if not filled:
            return output
        leaves, shape = tree_flatten(output)
        return tree_unflatten([filled.get(leaf, value) for leaf, value in enumerate(leaves)], shape)

    def _placeholder(self, number: int, args: Any, kwargs: Any) -> Any:
        """Something of the shape that the piece would give back; what was received of it, if anything was."""
        link, call = self.chain.links[number], self._calls[number] - 1
        leaves = tree_leaves((args, kwargs))
        if link.same_as_argument is not None:
            received = self._filled.get((number, call, 0))
            # Never the argument itself: the code behind may write into it.
            return torch.zeros_like(leaves[link.same_as_argument]) if received is None else received
        key = (number, tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves))
        if key not in self._shapes:
            self._shapes[key] = _shapes_of(self._skeleton.get_submodule(link.path), args, kwargs)
        output = tree_map(_zeros, self._shapes[key], is_leaf=lambda x: isinstance(x, _Like))
        return self._fill(number, call, output)


def _at(leaves: Sequence[Any], place: int) -> Any:
    return leaves[place] if place < len(leaves) else None


def _become(placeholder: torch.Tensor, tensor: torch.Tensor) -> None:
    """Code of the model may hold this very tensor, and use it again behind the piece: it becomes the other one."""
    try:
        swap_tensors(placeholder, tensor)
    except RuntimeError:  # Something else holds its memory.
        placeholder.copy_(tensor)


def _without_nested_tensors(model: nn.Module) -> None:
    """In evaluation `nn.TransformerEncoder` packs padded samples into nested tensors, which have no shape to be sent
    by. Without them it computes the same."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False


class Branched(RuntimeError):
    """A micro-batch takes another way through the model than the one that was cut into stages."""


def _unexpected(path: str, module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        f"{path} is called now, but was not when the model was cut into stages: a pipeline needs a model that calls "
        "the same layers in every step; leave pp out"
    )


class _Like:
    """The shape and type of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device


def _zeros(like: Any) -> Any:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device) if isinstance(like, _Like) else like


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model as it was built, of fakes: it computes nothing but shapes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, Any] = {}
    with mode:
        for tensor in [*model.parameters(), *model.buffers()]:
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            known[id(tensor)] = nn.Parameter(like, requires_grad=False) if isinstance(tensor, nn.Parameter) else like
        for tensor in results_held(model):
            known[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    # Copied around its tensors: each is known already, as its fake.
    return copy.deepcopy(model, known)


def _shapes_of(piece: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a piece would give back, found on fakes: nothing is computed. A piece whose code looks at values (which
    tokens chose an expert) cannot run on fakes; it runs once on zeros."""
    fakes = [p for p in piece.parameters() if isinstance(p, FakeTensor)]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
    faked = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    device = next((p.device for p in piece.parameters()), torch.device("cpu"))
    before = random_state(device)
    with torch.no_grad():
        try:
            with mode:
                output = piece(*faked[0], **faked[1])
        except LOOKS_AT_VALUES:
            given = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
            output = _of_zeros(piece)(*given[0], **given[1])
        finally:
            set_random_state(before, device)
    return tree_map(lambda x: _Like(x) if isinstance(x, torch.Tensor) else x, output)


def _of_zeros(piece: nn.Module) -> nn.Module:
    """A copy of a piece of fakes, with zeros in their place."""
    known: dict[int, Any] = {}
    for tensor in [*piece.parameters(), *piece.buffers()]:
        zeros = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        known[id(tensor)] = nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros
    known |= {id(tensor): tensor.detach() for tensor in results_held(piece)}
    return copy.deepcopy(piece, known)
