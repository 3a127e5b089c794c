"""One stage of a model: the model's own forward, with the pieces of other stages left out.

Nothing of the user's model is rewritten or traced into a graph. Each stage calls the full forward: pieces before the
stage hand something of the right shape through, the stage's first piece gets what the stage before sent in place of
it, and the first piece behind the stage ends the forward. What lies between pieces and depends on no parameter (masks,
rotary tables, positions) is thus computed by the model's own code, where it is needed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from shoal.layout.chain import Chain
from shoal.layout.wires import Place, Wire
from shoal.parallel.pipeline.arrival import Arrival, Branched, become
from shoal.parallel.pipeline.placeholder import WRITTEN, Like, learning, shapes_of, skeleton, zeros

Range = tuple[int, int]


class StageDone(BaseException):
    """Ends a forward where the next stage begins. Not an Exception: the model's code must not catch it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


class StagedModel:
    """A model of which this rank runs some stages."""

    def __init__(self, model: nn.Module, chain: Chain, stages: Sequence[Range], mine: Sequence[int]) -> None:
        self.model, self.chain, self.stages, self.mine = model, chain, list(stages), list(mine)
        _without_nested_tensors(model)
        self._skeleton = skeleton(model)
        self.held = [name for name, _ in model.named_parameters() if self._holders(name) & set(mine)]
        self.absent = self._drop()
        self._now: Range = (0, len(chain.links))
        self._begun = self._running = self._learning = False
        self._calls: Counter[int] = Counter()
        self._arriving: list[tuple[Wire, Arrival]] = []
        self._kept: dict[Place, Any] = {}
        """Results of pieces that were received, or are to be sent on."""
        self._shapes: dict[Any, Any] = {}
        self.arrived: Callable[[int, Wire, torch.Tensor], None] = lambda piece, wire, tensor: None
        """Called with each tensor that a stage has received, as its forward sees it."""
        self.in_full: Callable[[], Any] = nullcontext
        """Around the shapes of placeholders: these are of full tensors, whatever cuts those of this stage."""
        borders = [chain.links[stop] for _, stop in stages if stop < len(chain.links)]
        self._wanted = {place for link in borders for wire in link.wires for place in wire.results}
        self._renewed = [_places_of(model, name) for name in chain.renewed]

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
        held, dropped = set(self.held), {}
        absent = set()
        for name, param in self.model.named_parameters():
            if name not in held:
                nothing = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
                dropped[id(param)] = nn.Parameter(nothing, requires_grad=False)
                absent.add(name)
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in dropped:
                    module._parameters[name] = dropped[id(param)]
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
        self._begun, self._running, self._learning = False, True, torch.is_grad_enabled()
        self._calls = Counter()
        self._arriving = list(zip(self.chain.links[first].wires if first else (), received, strict=True))
        try:
            yield
        finally:
            self._arriving, self._kept = [], {}
            self._running, self._now = False, (0, len(self.chain.links))

    def run(self, stage: int, call: Callable[[], Any], received: Sequence[Arrival]) -> tuple[Any, list[torch.Tensor]]:
        """The stage's part of a forward: (what the model gave back, if it is the last stage; what goes on)."""
        first, stop = self.stages[stage]
        self._renew_buffers()
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
            except Exception as error:
                if not first or self._begun or getattr(error, "for_user", isinstance(error, Reentrant)):
                    raise
                if WRITTEN in str(error):
                    raise NotStaged(
                        "the model's own code writes into parameters that other stages of the pipeline hold (a teacher "
                        "that follows its student?): write into a block's parameters in its own forward, from "
                        "parameters of the same block, or train without pp"
                    ) from error
                raise NotStaged(
                    f"a stage begins at {self.chain.links[first].path}, but the model's own code in front of it fails "
                    f"with {type(error).__name__}: {error}. It may read what an earlier block leaves behind (an "
                    "attribute, an entry that a hook makes): return that from the block, or cut elsewhere with "
                    "LayoutHints(stages=...)"
                ) from error
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
        tensors = [x for x in sent if isinstance(x, torch.Tensor)]
        absent = len(sent) - len(tensors)
        if absent:
            found = f"is given {len(sent) - absent} of the {len(sent)} tensors that crossed to it"
            raise Branched(self._was_called(number, found))
        known = {id(x) for x in sent}
        learned = [x for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None and id(x) not in known]
        if learned:
            found = f"is given {len(sent) + len(learned)} tensors instead of {len(sent)}"
            raise Branched(self._was_called(number, found))
        return [t if w.learns else t.detach() for w, t in zip(wires, tensors, strict=True)]

    def _renew_buffers(self) -> None:
        """A buffer that the forward changes is another tensor in each: backward of an earlier micro-batch needs it as
        it was."""
        if self.model.training and torch.is_grad_enabled():
            for places in self._renewed:
                module, name = places[0]
                fresh = module._buffers[name].clone()  # type: ignore[union-attr]
                for module, name in places:
                    module._buffers[name] = fresh

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
        if self._learning and not torch.is_grad_enabled():
            _require_no_reentrant_checkpoint(self.chain.links[number].path)
        if number == stop:
            raise StageDone(self._crossing(number, tree_leaves((args, kwargs))))
        if number == first and first and not self._begun:
            self._begun = True  # A piece that runs several times gets what was sent the first time.
            return self._arrive(args, kwargs)
        return None

    def _arrive(self, args: Any, kwargs: Any) -> Any:
        """What was received takes the place of all that stood for it: code may use that very tensor again, behind the
        stage's first piece."""
        leaves, shape = tree_flatten((args, kwargs))
        for wire, arrival in self._arriving:
            standing = [self._kept.get(place) for place in wire.results]
            standing += [_at(leaves, place) for place in wire.arguments]
            for each in {id(each): each for each in standing if isinstance(each, torch.Tensor)}.values():
                entered = arrival.enter(expected=wire.learns)
                if become(each, entered):
                    self.arrived(self._now[0], wire, each)
                    continue
                self.arrived(self._now[0], wire, entered)
                if wire.beside:
                    each.copy_(entered)
                else:
                    leaves = [entered if leaf is each else leaf for leaf in leaves]
        return tree_unflatten(leaves, shape)

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls[number] += 1
        if number >= self._now[0]:
            return forward(*args, **kwargs)
        return self._placeholder(number, args, kwargs)

    def _after(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        """Behind the hooks of the model, which may have changed what the piece gave back."""
        call = self._calls[number] - 1
        if self._running and any(place[:2] == (number, call) for place in self._wanted):
            leaves = enumerate(tree_leaves(output))
            self._kept |= {(number, call, leaf): t for leaf, t in leaves if (number, call, leaf) in self._wanted}

    def _placeholder(self, number: int, args: Any, kwargs: Any) -> Any:
        """Something of the shape that the piece would give back."""
        link = self.chain.links[number]
        given = link.calls[min(self._calls[number], len(link.calls)) - 1]
        leaves = tree_leaves((args, kwargs))
        if link.same_as_argument is not None:
            like = leaves[link.same_as_argument]
            # Otherwise not the argument itself: the code behind may write into it.
            return like if given.passed else learning(torch.zeros_like(like), 0 in given.learning)
        key = (number, tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves))
        if key not in self._shapes:
            with self.in_full():
                self._shapes[key] = shapes_of(self._skeleton.get_submodule(link.path), args, kwargs)
        outputs, shape = tree_flatten(self._shapes[key], is_leaf=lambda x: isinstance(x, Like))
        made = [
            leaves[given.passed[n]] if n in given.passed else learning(zeros(like), n in given.learning)
            for n, like in enumerate(outputs)
        ]
        return tree_unflatten(made, shape)


def _places_of(model: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Where modules hold a buffer."""
    buffer = model.get_buffer(name)
    return [(m, key) for m in model.modules() for key, value in m._buffers.items() if value is buffer]


def _require_no_reentrant_checkpoint(path: str) -> None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise Reentrant(
                f"{path} is called inside torch.utils.checkpoint with use_reentrant=True, whose backward does not see "
                "what a stage has received; use use_reentrant=False there, or recompute('full') instead"
            )
        frame = frame.f_back


class NotStaged(ValueError):
    """Code between pieces cannot run in a stage."""


class Reentrant(ValueError):
    """The model's own checkpointing hides a piece from its stage."""


def _at(leaves: Sequence[Any], place: int) -> Any:
    return leaves[place] if place < len(leaves) else None


def _without_nested_tensors(model: nn.Module) -> None:
    """In evaluation `nn.TransformerEncoder` packs padded samples into nested tensors, which have no shape to be sent
    by. Without them it computes the same."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False


def _unexpected(path: str, module: nn.Module, args: Any) -> None:
    raise Branched(
        f"{path} is called now, but was not when the model was cut into stages: a pipeline needs a model that calls "
        "the same layers in every step; leave pp out"
    )
