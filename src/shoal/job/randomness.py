"""Random numbers of a forward as a function of (seed, sample counter, place in the model), whatever the strategy.

A place is a module's path, the number of its call in a forward and the number of the draw in that call. Each sample
draws its own numbers there, for the uncut tensor; a rank that holds part of the tensor takes its part of them. What has
no sample dimension (layer drop, noise on weights) is drawn once a step. So a mask does not depend on stages, replicas,
micro-batches or cuts, and no two places share one.

Draws are intercepted below autograd, so every spelling of dropout arrives here, and only while a module runs that is
known to draw (`draw_places.py`): other modules pay nothing. The seed of the default generator serves as a cursor into
the log of a step's draws: recomputation sets that generator back, and with it the draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.job.draw_places import ROOT, Drawn, Place, Places, is_random
from shoal.job.draw_rules import RULES, UNCUT, Numbers, key_of

CURSOR_BITS = 20
"""Draws of one forward that the cursor can count: a million."""


class CannotPlace(ValueError):
    """A draw that has no place in the uncut model."""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How the ranks of tp and cp cut activations: sizes, this rank's indices, and the positions of a cut sequence."""

    tensor: int = 1
    tensor_index: int = 0
    context: int = 1
    context_index: int = 0
    length: int = 0
    """Positions of the uncut sequence under cp."""
    positions: Callable[[int], np.ndarray] | None = None
    """This rank's positions of a dimension that cp has cut, by its uncut size."""
    salt: tuple[int, ...] = ()
    """Of draws for which there is no rule: different on ranks that hold different stages or positions."""

    def parts(self, whole: Sequence[int], local: Sequence[int]) -> tuple[np.ndarray | None, ...] | None:
        """For each dimension what this rank holds of it, None for all; None in place of all where sizes do not fit."""
        if len(whole) != len(local):
            return None
        found: list[np.ndarray | None] = []
        sequence_done = False
        for size, mine in zip(whole, local, strict=True):
            if size == mine:
                found.append(None)
                continue
            if not mine or size % mine:
                return None
            ratio = size // mine
            by_context = ratio == self.context and (self.context != self.tensor or size == self.length)
            if by_context and not (sequence_done and self.context == self.tensor):
                sequence_done = sequence_done or size == self.length
                found.append(self._positions(size))
            elif ratio == self.tensor:
                found.append(np.arange(size)[self.tensor_index * mine : (self.tensor_index + 1) * mine])
            elif ratio == self.tensor * self.context and self.context > 1:
                found.append(self._twice(size, mine))
            else:
                return None
        return tuple(found)

    def _positions(self, size: int) -> np.ndarray:
        assert self.positions is not None
        return self.positions(size)

    def _twice(self, size: int, mine: int) -> np.ndarray:
        """Positions: cp cuts the sequence and tp what is left. Heads: tp cuts them and Ulysses what is left."""
        if size == self.length:
            return self._positions(size)[self.tensor_index * mine : (self.tensor_index + 1) * mine]
        start = (self.tensor_index * self.context + self.context_index) * mine
        return np.arange(start, start + mine)


@dataclass
class ForwardDraws:
    """One call of the model: whose random numbers it draws, and how far it is."""

    samples: tuple[int, ...]
    """Counters of the samples, in the order of the batch."""
    gathered: tuple[int, ...]
    """The same inside regions that gather samples from several ranks."""
    step: int
    """Counter of the step's first sample."""
    calls: dict[str, int] = field(default_factory=dict)
    stack: list[list[Any]] = field(default_factory=lambda: [["", 0, 0, _checkpoint()]])
    """Of the modules that run now: path, number of the call, draws so far, the checkpoint around it."""

    def next_place(self) -> Place:
        top = self.stack[-1]
        top[2] += 1
        return Place(top[0], top[1], top[2] - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """How the numbers of one tensor are put together."""

    kind: str
    """"sample", "step" or, where no rule applies, "rank"."""
    dim: int = 0
    gathered: bool = False
    whole: tuple[int, ...] = ()
    parts: tuple[np.ndarray | None, ...] = ()


class Randomness:
    """The random numbers of a model's forwards. `install` once, then `forward(...)` around each call of the model."""

    def __init__(self, seed: int, places: Places, cuts: Cuts | None = None, *, exact: bool = False) -> None:
        """`exact`: for a proof. What cannot be placed is refused, and all numbers are drawn on the CPU."""
        self.seed, self.places, self.exact = seed, places, exact
        self.cuts = cuts or Cuts()
        self.current: ForwardDraws | None = None
        self._mode = _Draws(self)
        self._open = 0
        self._log: dict[int, tuple[ForwardDraws, Place]] = {}
        self._bases: dict[int, int] = {}
        """Where the cursor of each forward begins -> the step it belongs to."""
        self.steps_in_flight = 1
        """Steps whose draws a backward may still repeat: more than one in a pipeline that is never flushed."""
        self._plans: dict[tuple[Place, tuple[int, ...], int, int], _Plan] = {}
        self._numbers = Numbers()
        self.notes_only = False
        """In a check that must go on: what cannot be placed is noted in `unplaced`, not refused."""
        self.unplaced: list[str] = []

    def install(self, model: nn.Module) -> None:
        """Watches the modules that draw. After parameters are cut, before recomputation is applied."""
        for path, module in model.named_modules():
            if path in self.places.owners:
                module.forward = partial(self._call, path, module.forward)  # type: ignore[method-assign]

    def _call(self, path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        current = self.current
        if current is None:
            return forward(*args, **kwargs)
        number = current.calls.get(path, 0)
        current.calls[path] = number + 1
        current.stack.append([path or ROOT, number, 0, _checkpoint()])
        try:
            with self._watching():
                return forward(*args, **kwargs)
        finally:
            current.stack.pop()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if self._open:
            yield
            return
        self._open += 1
        try:
            with self._mode:
                yield
        finally:
            self._open -= 1

    @contextmanager
    def forward(self, samples: Sequence[int], step: int, gathered: Sequence[int] = ()) -> Iterator[None]:
        """Around one call of the model (and its loss) on the samples with these counters, in a step that starts at
        counter `step`. What is recomputed later in backward draws the same again."""
        self._forget_before(step)
        current = ForwardDraws(tuple(samples), tuple(gathered), step)
        first = samples[0] if len(samples) else step
        number = sum(each == step for each in self._bases.values())
        base = key_of(self.seed, first, number, *self.cuts.salt) >> (CURSOR_BITS + 1)
        self._bases[base] = step
        torch.default_generator.manual_seed(base << CURSOR_BITS)
        if self.exact or self.places.other_generators:
            # Draws of Python and NumPy have no place; at least all ranks and the serial run draw the same in a step.
            random.seed(key_of(self.seed, step))
            np.random.seed(key_of(self.seed, step) & 0xFFFFFFFF)
        self.current = current
        with self.resumed():
            yield
        if self.exact and not _is_fresh(torch.default_generator):
            self._cannot_place(
                "a module that drew no random numbers when the model was called on a few samples draws some now (in a "
                "later step, or by a condition): no serial run draws the same; for a proof leave them out"
            )

    def _forget_before(self, step: int) -> None:
        """Of steps that no backward can belong to any more."""
        known = dict.fromkeys(self._bases.values())
        if step not in known:
            kept = set([*known, step][-self.steps_in_flight :])
            self._bases = {base: each for base, each in self._bases.items() if each in kept}
            self._log = {cursor: what for cursor, what in self._log.items() if cursor >> CURSOR_BITS in self._bases}

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """The same for what belongs to a call but comes after it, such as the loss."""
        # The call stays the current one afterwards: modules are called again in backward.
        if self.current is not None and self.places.outside:
            with self._watching():
                yield
        else:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward of a serial run: what its own code draws there has no place, and is refused for a proof."""
        before = torch.default_generator.get_state()
        yield
        if self.exact and not torch.equal(before, torch.default_generator.get_state()):
            raise CannotPlace(
                "backward draws random numbers (a gradient hook or an autograd function that adds noise): no serial "
                "run draws the same; for a proof leave them out"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """For evaluation: nothing is placed."""
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    def drawn(self, shape: Sequence[int], device: torch.device, kind: str) -> torch.Tensor | torch.Generator:
        """The numbers of the next draw, on the CPU, of one of the kinds that `Draw` names. On another device, in
        training, a generator of that device in their place."""
        forward, place = self._next()
        shape = tuple(int(size) for size in shape)
        memo = (place, shape, len(forward.samples), len(forward.gathered))
        plan = self._plans.get(memo)
        if plan is None:
            plan = self._plans[memo] = self._plan(forward, place, shape)
        if kind in UNCUT and any(part is not None for part in plan.parts):
            self._cannot_place(
                f"{_named(place.path)} draws a {UNCUT[kind]} of {shape[-1]} elements, which are cut by tp or cp: no "
                "serial run draws the same; for a proof leave it out"
            )
        if device.type != "cpu" and not self.exact:
            generator = _generator(device)
            if generator is not None:
                return generator.manual_seed(self._one_key(forward, place, plan))
        return self._draw(forward, place, plan, shape, kind)

    @property
    def top(self) -> list[Any]:
        """The innermost module that runs."""
        assert self.current is not None
        return self.current.stack[-1]

    def _next(self) -> tuple[ForwardDraws, Place]:
        """Which draw this is: a repetition of one in the log, or a new one."""
        assert self.current is not None
        cursor = torch.default_generator.initial_seed()
        known = self._log.get(cursor)
        if known is None:
            known = self.current, self.current.next_place()
            if cursor >> CURSOR_BITS in self._bases:
                self._log[cursor] = known
        if cursor >> CURSOR_BITS in self._bases:
            torch.default_generator.manual_seed(cursor + 1)
        return known

    def _plan(self, forward: ForwardDraws, place: Place, shape: tuple[int, ...]) -> _Plan:
        known = self.places.drawn.get(place)
        varies = known is not None and known.varies
        # A module that draws on conditions may draw here what another call of it drew elsewhere.
        alike = [what for at, what in self.places.drawn.items() if at.path == place.path]
        tried = [(what, False) for what in (known, *alike) if what is not None]
        if not varies:
            tried += [(what, True) for what in (known, self._guess(forward, shape)) if what is not None]
        for what, lenient in tried:
            plan = self._fitted(what, forward, shape, lenient=lenient)
            if plan is not None:
                return plan
        why = "how many depends on more than the number of samples"
        if known is not None and not varies:
            why = f"which is no part of the uncut {list(known.whole)} by tp or cp"
        self._cannot_place(
            f"{_named(place.path)} draws random numbers of shape {list(shape)}, and {why}: no serial run "
            "draws the same; for a proof set the rate of this module to 0"
        )
        return _Plan(kind="rank")

    def _cannot_place(self, why: str) -> None:
        """What a proof refuses; other checks go on, and know afterwards that their numbers cannot be compared."""
        if self.exact and not self.notes_only:
            raise CannotPlace(why)
        if self.exact and why not in self.unplaced:
            self.unplaced.append(why)

    def _guess(self, forward: ForwardDraws, shape: tuple[int, ...]) -> Drawn | None:
        """For a place that no call of the model showed before. Without cuts the local shape is the uncut one."""
        if self.cuts.tensor * self.cuts.context > 1 or not forward.samples:
            return None
        if shape and shape[0] % len(forward.samples) == 0:
            return Drawn(dim=0, whole=(shape[0] // len(forward.samples), *shape[1:]))
        return Drawn(dim=None, whole=shape)

    def _fitted(self, known: Drawn, forward: ForwardDraws, shape: tuple[int, ...], *, lenient: bool) -> _Plan | None:
        """`lenient`: samples may have other lengths than those that were looked at, where nothing is cut."""
        if known.varies:
            return None
        if known.dim is None:
            parts = self.cuts.parts(known.whole, shape)
            return None if parts is None else _Plan(kind="step", whole=_whole(known.whole, shape, parts), parts=parts)
        dim = known.dim if known.dim < len(shape) else 0
        for samples, gathered in ((forward.samples, False), (forward.gathered, True)):
            if not samples or not shape or shape[dim] % len(samples):
                continue
            local = _of_one((shape[dim] // len(samples), *shape[:dim], *shape[dim + 1 :]))
            whole = _of_one(known.whole)
            parts = self.cuts.parts(whole, local)
            if parts is None and lenient and self.cuts.tensor * self.cuts.context == 1 and len(whole) == len(local):
                parts = (None,) * len(local)
            if parts is not None:
                uncut = _whole(whole, local, parts)
                return _Plan(kind="sample", dim=dim, gathered=gathered, whole=uncut, parts=parts)
        return None

    def _one_key(self, forward: ForwardDraws, place: Place, plan: _Plan) -> int:
        first = forward.samples[0] if forward.samples and plan.kind != "step" else forward.step
        held = [int(part[0]) if part is not None else 0 for part in plan.parts]
        salt = self.cuts.salt if plan.kind == "rank" else ()
        return key_of(self.seed, place.key, first, len(plan.kind), *held, *salt) >> 1

    def _draw(
        self, forward: ForwardDraws, place: Place, plan: _Plan, shape: tuple[int, ...], kind: str
    ) -> torch.Tensor:
        numbers = self._numbers
        if plan.kind == "rank":
            return torch.from_numpy(numbers.fill(kind, shape, place.key, self._one_key(forward, place, plan)))
        if plan.kind == "step":
            values = numbers.fill(kind, plan.whole, place.key, key_of(self.seed, forward.step, -1))
            return torch.from_numpy(np.ascontiguousarray(_taken(values, plan.parts))).reshape(shape)
        samples = forward.gathered if plan.gathered else forward.samples
        cut = any(part is not None for part in plan.parts)
        local = tuple(size if part is None else len(part) for size, part in zip(plan.whole, plan.parts, strict=True))
        together = numbers.empty(kind, (len(samples), *local))
        for row, sample in enumerate(samples):
            key = key_of(self.seed, sample)
            if cut:
                together[row] = _taken(numbers.fill(kind, plan.whole, place.key, key), plan.parts)
            else:
                numbers.fill_into(kind, together[row, ...], place.key, key)
        rows = shape[plan.dim] // len(samples)
        others = (*shape[: plan.dim], *shape[plan.dim + 1 :])
        laid = torch.from_numpy(together).reshape(len(samples) * rows, *others)
        return laid.movedim(0, plan.dim) if plan.dim else laid


def _is_fresh(generator: torch.Generator) -> bool:
    """Whether nothing was drawn since it was seeded."""
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return torch.equal(fresh.get_state(), generator.get_state())


def _named(path: str) -> str:
    return "the model's own forward" if path == ROOT else path or "the job"


def _checkpoint() -> tuple[int, bool]:
    """Differs where one more `torch.utils.checkpoint` is around: they save tensors by hooks, or compute without a
    gradient."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return id(hooks[0]) if hooks else 0, torch.is_grad_enabled()


def _in_own_checkpoint(entered: tuple[int, bool]) -> bool:
    """Whether a checkpoint was begun since a module was entered. A gradient may be off for other reasons, too."""
    now = _checkpoint()
    if now[0] != entered[0]:
        return True
    frame = sys._getframe() if now != entered else None
    while frame is not None and frame.f_code is not Randomness._call.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _of_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample, which may have several rows."""
    return shape[1:] if shape[0] == 1 else shape


def _whole(known: tuple[int, ...], local: tuple[int, ...], parts: tuple[np.ndarray | None, ...]) -> tuple[int, ...]:
    return tuple(k if part is not None else mine for k, mine, part in zip(known, local, parts, strict=True))


def _taken(values: np.ndarray, parts: tuple[np.ndarray | None, ...]) -> np.ndarray:
    for dim, part in enumerate(parts):
        if part is not None:
            values = values.take(part, axis=dim)
    return values


_GENERATORS: dict[torch.device, torch.Generator | None] = {}


def _generator(device: torch.device) -> torch.Generator | None:
    if device not in _GENERATORS:
        try:
            _GENERATORS[device] = torch.Generator(device)
        except RuntimeError:
            _GENERATORS[device] = None
    return _GENERATORS[device]


class _Draws(TorchDispatchMode):
    """Puts the numbers of the rule in the place of those that an operation would draw."""

    def __init__(self, randomness: Randomness) -> None:
        super().__init__()
        self.randomness = randomness

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        rule = RULES.get(func)
        if rule is None:
            if self.randomness.exact and is_random(func, args, named):
                self.randomness._cannot_place(
                    f"{_named(self.randomness.top[0])} draws random numbers by {func}, which has no rule: "
                    "no serial run draws the same; for a proof leave them out of this module"
                )
            return func(*args, **named)
        top = self.randomness.top
        if _in_own_checkpoint(top[3]):
            # Only a part of the module is called again in backward, by PyTorch, which sets the generator back for it.
            self.randomness._cannot_place(
                f"{_named(top[0])} draws random numbers inside a checkpoint of its own: they have no place "
                'when they are drawn again; leave the checkpoint out and use recompute("full") in the strategy'
            )
            return func(*args, **named)
        return rule(self.randomness.drawn, func, args, named)
