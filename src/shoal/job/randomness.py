"""Random numbers of a forward as a function of (seed, sample counter, place in the model), the same for any strategy.

A place is a module's path, the number of its call in a forward and the number of the draw in that call. Each sample
draws its own numbers there, for the full tensor; a rank that holds part of the tensor takes its part of them. Draws
without a sample dimension (layer drop, noise on weights) are made once a step. So a mask does not depend on stages,
replicas, micro-batches or cuts, and no two places share one.

Draws are intercepted below autograd, so every form of dropout is seen, but only while a module runs that is known to
draw (`draw_places.py`): other modules cost nothing. The seed of the default generator serves as a cursor into the log
of a step's draws: recomputation restores that generator, and with it the draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.job.draw_places import ROOT, Place, Places, is_random
from shoal.job.draw_plan import Cuts, DrawnSamples, DrawPlan, PlacedNumbers
from shoal.job.draw_rules import RULES, UNCUT, key_of

CURSOR_BITS = 20
"""Draws of one forward that the cursor can count: a million."""


class CannotPlace(ValueError):
    """A draw that has no place in the full model."""


@dataclass
class ForwardDraws(DrawnSamples):
    """The draws of one call of the model: for which samples, and how far it has come."""

    calls: dict[str, int] = field(default_factory=dict)
    stack: list[list[Any]] = field(default_factory=lambda: [["", 0, 0, _checkpoint()]])
    """The modules that run now: path, number of the call, draws so far, the enclosing checkpoint."""

    def next_place(self) -> Place:
        top = self.stack[-1]
        top[2] += 1
        return Place(top[0], top[1], top[2] - 1)


class Randomness:
    """The random numbers of a model's forwards. Call `install` once, then wrap each call of the model in `forward`."""

    def __init__(self, seed: int, places: Places, cuts: Cuts | None = None, *, exact: bool = False) -> None:
        """`exact` is for proofs: a draw without a place is refused, and all numbers are drawn on the CPU."""
        self.seed, self.places, self.exact = seed, places, exact
        self.current: ForwardDraws | None = None
        self._mode = _Draws(self)
        self._open = 0
        self._log: dict[int, tuple[ForwardDraws, Place]] = {}
        self._bases: dict[int, int] = {}
        """First cursor value of each forward -> its step."""
        self.steps_in_flight = 1
        """Steps whose draws a backward may still repeat: more than one in a pipeline that is never flushed."""
        self._plans: dict[tuple[Place, tuple[int, ...], int, int], DrawPlan] = {}
        self.numbers = PlacedNumbers(seed, cuts or Cuts())
        self.notes_only = False
        """For checks that must continue: draws without a place are noted in `unplaced` instead of refused."""
        self.unplaced: list[str] = []

    def install(self, model: nn.Module) -> None:
        """Wraps the modules that draw. Call it after parameters are partitioned, before recomputation is applied."""
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
        """Wraps one call of the model (and its loss) on the samples with these counters, in a step that starts at
        counter `step`. Recomputation in backward draws the same numbers again."""
        self._forget_before(step)
        current = ForwardDraws(tuple(samples), tuple(gathered), step)
        first = samples[0] if len(samples) else step
        number = sum(each == step for each in self._bases.values())
        base = key_of(self.seed, first, number, *self.numbers.cuts.salt) >> (CURSOR_BITS + 1)
        self._bases[base] = step
        torch.default_generator.manual_seed(base << CURSOR_BITS)
        if self.exact or self.places.other_generators:
            # Draws of Python and NumPy have no place, but all ranks and the serial run draw the same in a step.
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
        """Drops the logs of steps whose backward is over."""
        known = dict.fromkeys(self._bases.values())
        if step not in known:
            kept = set([*known, step][-self.steps_in_flight :])
            self._bases = {base: each for base, each in self._bases.items() if each in kept}
            self._log = {cursor: what for cursor, what in self._log.items() if cursor >> CURSOR_BITS in self._bases}

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Wraps code that belongs to the last call but runs after it, such as the loss."""
        # The call stays current afterwards: recomputation calls modules again in backward.
        if self.current is not None and self.places.outside:
            with self._watching():
                yield
        else:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps the backward of a serial run: draws of the user's code there have no place; a proof refuses them."""
        before = torch.default_generator.get_state()
        yield
        if self.exact and not torch.equal(before, torch.default_generator.get_state()):
            raise CannotPlace(
                "backward draws random numbers (a gradient hook or an autograd function that adds noise): no serial "
                "run draws the same; for a proof leave them out"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turns placement off, for evaluation."""
        before, self.current = self.current, None
        try:
            yield
        finally:
            self.current = before

    def drawn(self, shape: Sequence[int], device: torch.device, kind: str) -> torch.Tensor | torch.Generator:
        """The numbers of the next draw, of one of the kinds that `Draw` names, on the CPU. For training on another
        device: a seeded generator of that device instead."""
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
                return generator.manual_seed(self.numbers.key(forward, place, plan))
        return self.numbers.values(forward, place, plan, shape, kind)

    @property
    def top(self) -> list[Any]:
        """The innermost running module."""
        assert self.current is not None
        return self.current.stack[-1]

    def _next(self) -> tuple[ForwardDraws, Place]:
        """The current draw: one of the log again (recomputation), or a new one."""
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

    def _plan(self, forward: ForwardDraws, place: Place, shape: tuple[int, ...]) -> DrawPlan:
        known = self.places.drawn.get(place)
        varies = known is not None and known.varies
        # A module that draws conditionally may draw here what another of its calls drew elsewhere.
        alike = [what for at, what in self.places.drawn.items() if at.path == place.path]
        tried = [(what, False) for what in (known, *alike) if what is not None]
        if not varies:
            tried += [(what, True) for what in (known, self.numbers.guess(forward, shape)) if what is not None]
        for what, lenient in tried:
            plan = self.numbers.fitted(what, forward, shape, lenient=lenient)
            if plan is not None:
                return plan
        why = "how many depends on more than the number of samples"
        if known is not None and not varies:
            why = f"which is no part of the uncut {list(known.full)} by tp or cp"
        self._cannot_place(
            f"{_named(place.path)} draws random numbers of shape {list(shape)}, and {why}: no serial run "
            "draws the same; for a proof set the rate of this module to 0"
        )
        return DrawPlan(kind="rank")

    def _cannot_place(self, why: str) -> None:
        """Raises in a proof. Other checks continue and know afterwards that their numbers cannot be compared."""
        if self.exact and not self.notes_only:
            raise CannotPlace(why)
        if self.exact and why not in self.unplaced:
            self.unplaced.append(why)


def _is_fresh(generator: torch.Generator) -> bool:
    """Whether nothing was drawn since it was seeded."""
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return torch.equal(fresh.get_state(), generator.get_state())


def _named(path: str) -> str:
    return "the model's own forward" if path == ROOT else path or "the job"


def _checkpoint() -> tuple[int, bool]:
    """Changes when one more `torch.utils.checkpoint` is entered: it installs saved-tensor hooks, or disables grad."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return id(hooks[0]) if hooks else 0, torch.is_grad_enabled()


def _in_own_checkpoint(entered: tuple[int, bool]) -> bool:
    """Whether a checkpoint was entered since a module was. Grad can be off for other reasons, so frames decide."""
    now = _checkpoint()
    if now[0] != entered[0]:
        return True
    frame = sys._getframe() if now != entered else None
    while frame is not None and frame.f_code is not Randomness._call.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_GENERATORS: dict[torch.device, torch.Generator | None] = {}


def _generator(device: torch.device) -> torch.Generator | None:
    if device not in _GENERATORS:
        try:
            _GENERATORS[device] = torch.Generator(device)
        except RuntimeError:
            _GENERATORS[device] = None
    return _GENERATORS[device]


class _Draws(TorchDispatchMode):
    """Replaces the numbers that an operation would draw by those of its place."""

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
            # PyTorch calls only a part of the module again in backward, and restores the generator for it itself.
            self.randomness._cannot_place(
                f"{_named(top[0])} draws random numbers inside a checkpoint of its own: they have no place "
                'when they are drawn again; leave the checkpoint out and use recompute("full") in the strategy'
            )
            return func(*args, **named)
        return rule(self.randomness.drawn, func, args, named)
