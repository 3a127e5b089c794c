"""What a block's forward changes of its own state (buffers, counters, attributes), so that a repetition can be undone.

Spectral norm iterates its vectors in forward, batch norm and moving averages update buffers, modules count their
calls. A repetition in backward must start from the state that the first forward saw, and must leave the state as the
forwards alone have made it. `layout/held_state.py` finds what there is to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shoal.layout.held_state import HeldNow, StateHolder, copy_of, with_copies


class ChangesParameters(ValueError):
    """A block that is computed again in backward changes its parameters in forward."""


class ForwardState:
    """One call of a block: the state before it, as far as the call changed it."""

    def __init__(self, name: str, block: nn.Module, generators: list[StateHolder]) -> None:
        """`generators`: those of Python and NumPy from which the block may draw. Those from which it has not drawn are
        taken off the list, since it costs time to ask for their state."""
        self._name, self._modules, self._generators = name, list(block.modules()), generators
        self._before: list[tuple[StateHolder, Any]] = []
        """What the first forward changed, and its content before."""
        self._copies: dict[int, Any] = {}
        """By identity, arrays that it wrote to, as they were."""

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the first forward: notes what it changes."""
        versions, held = self._versions(), HeldNow(self._modules, self._generators)
        yield
        for name, version in self._versions().items():
            if version != versions.get(name, version):
                changed = name.partition(".")[2]
                raise ChangesParameters(
                    f"recompute: {self._name or 'the model'} changes its parameter {changed} in forward, and computing "
                    "it again in backward would change it twice; leave recompute out, or keep the value in a buffer"
                )
        # Also what was changed and changed back: a repetition may end halfway, when it has what backward needs.
        self._before, self._copies = held.changed()
        drawn_from = [each for each, _ in self._before]
        self._generators[:] = [each for each in self._generators if each in drawn_from]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a repetition: the state is that of the first forward, and afterwards what it is now."""
        after = [(held, held.content()) for held, _ in self._before]
        fresh = {key: copy_of(copy)[0] for key, copy in self._copies.items()}
        for held, content in self._before:
            held.put(with_copies(content, fresh))
        try:
            yield
        finally:
            for held, content in after:
                held.put(content)

    def _versions(self) -> dict[str, int]:
        return {
            f"{number}.{name}": param._version
            for number, module in enumerate(self._modules)
            for name, param in module._parameters.items()
            if param is not None
        }
