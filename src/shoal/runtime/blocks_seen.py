"""Which blocks the forwards of a step have called, seen at the blocks: under `zero=3` this decides what is gathered.

A model may leave out blocks by its data or at random. Each block that a micro-batch calls is gathered, and so is the
one behind it (in the order in which blocks were first called), ahead of its turn. The engine's own account is not used.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from shoal.comm.ledger import BOOK
from shoal.estimate.shard_table import Gathers


class BlocksSeen:
    """Hooks on a model and on its blocks."""

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        self._order: list[str] = []
        self._called: list[set[str]] = []
        """By micro-batch."""
        self._gathered: list[set[str]] = []
        model.register_forward_pre_hook(self._begin)
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(self._call(name))

    def forget(self) -> None:
        self._called, self._gathered = [], []

    @property
    def any(self) -> bool:
        """Whether there was a forward since they were forgotten."""
        return bool(self._called)

    def gathers(self, block: str) -> Gathers:
        """How many micro-batches gather a block, in forward and in backward."""
        return Gathers(*(sum(block in names for names in seen) for seen in (self._gathered, self._called)))

    def _begin(self, _: nn.Module, args: Any) -> None:
        if BOOK.phase != "evaluate":
            self._called.append(set())
            self._gathered.append(set())

    def _call(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # A backward that recomputes the block.
            if name not in self._order:
                self._order.append(name)
            if BOOK.phase != "evaluate" and self._called:
                at = self._order.index(name)
                self._called[-1].add(name)
                self._gathered[-1].update(self._order[at : at + 2])

        return hook
