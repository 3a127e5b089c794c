"""Islands in the serial run of a proof: copies of the model that step by themselves, one after the other, and exchange.

Plain PyTorch, as `reference.py`: what an exchange does is the scheme's own simulation, handed in as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn


class Island(Protocol):
    """A copy of the model, as far as an exchange sees it."""

    model: nn.Module
    kept: Any
    """Of the scheme that ties islands together."""
    counted: float
    """Samples or tokens since the last exchange."""

    @property
    def named(self) -> Mapping[str, nn.Parameter]: ...


Exchange = Callable[[list[list[torch.Tensor]], list[float], list[Any]], None]


@dataclass(frozen=True)
class Islands:
    """Copies of the model that step by themselves and exchange their parameters now and then (local SGD)."""

    num: int
    every: int
    """Steps from one average to the next."""
    replicas: int
    """Parts of a micro-batch, over all islands; each island has as many."""
    micro_batches: int
    """Pieces that a batch is cut into before it is split among replicas."""
    exchange: Exchange
    """What an exchange does to the parameters of all, given their weights and what each keeps."""
    begin: Callable[[list[torch.Tensor]], Any]
    """What each keeps, given its parameters at the start."""
    agreed: Callable[[list[list[torch.Tensor]], list[Any]], list[torch.Tensor]] | None = None
    """The parameters that are evaluated, where islands are not equal after an exchange; each then keeps its buffers."""

    start: int = 0
    """Steps at the start in which all of them learn from the gradients of all."""
    at: Callable[[int, Sequence[Island]], bool] | None = None
    """What the scheme does after a step (from 0), if that is not an exchange every few steps."""

    logs: Sequence[Sequence[Sequence[Any]]] | None = None
    """Of each island, where timing decides the order of exchanges (`replay.py`),"""
    replay: Callable[[Any, Sequence[Any], Any], list[tuple[float, float]]] | None = None
    """and what repeats them, given logs, copies and a function that makes an update (`replay.py`)."""

    def share(self, positions: np.ndarray, island: int, *, separate: bool, parts: int) -> list[np.ndarray]:
        """An island's pieces of a batch: of each micro-batch its part, joined unless they are computed separately."""
        each = self.replicas // self.num
        mine = slice(island * each, (island + 1) * each)
        micros = [np.array_split(piece, self.replicas)[mine] for piece in np.array_split(positions, self.micro_batches)]
        if parts > 1:
            return [part for pieces in micros for part in pieces]
        joined = [np.concatenate(pieces) for pieces in micros]
        return joined if separate else [np.concatenate(joined)]


def after_step(step: int, copies: Sequence[Island], islands: Islands) -> None:
    """What islands do after a step (from 0)."""
    with torch.no_grad():
        done = islands.at is not None and islands.at(step, copies)
    if not done and (step + 1) % islands.every == 0:
        _exchange(copies, islands)


def _exchange(copies: Sequence[Island], islands: Islands) -> None:
    """What most islands do every few steps; those that are equal afterwards average their buffers, too."""
    weights = _weights(copies)
    with torch.no_grad():
        islands.exchange([[*copy.named.values()] for copy in copies], weights, [copy.kept for copy in copies])
        if islands.agreed is None:
            _average_tensors([[*copy.model.buffers()] for copy in copies], weights)
    for copy in copies:
        copy.counted = 0.0


def agree(copies: Sequence[Island], islands: Islands) -> None:
    """All copies become what is evaluated."""
    with torch.no_grad():
        if islands.agreed is not None:
            agreed = islands.agreed([[*copy.named.values()] for copy in copies], [copy.kept for copy in copies])
            for copy in copies:
                for param, value in zip(copy.named.values(), agreed, strict=True):
                    param.copy_(value)
            _average_tensors([[*copy.model.buffers()] for copy in copies], [1 / len(copies)] * len(copies))
        elif any(copy.counted for copy in copies):
            _average_tensors([[*copy.named.values(), *copy.model.buffers()] for copy in copies], _weights(copies))


def _weights(copies: Sequence[Island]) -> list[float]:
    """By what each learned from since the last exchange."""
    return [copy.counted / sum(copy.counted for copy in copies) for copy in copies]


def _average_tensors(held: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> None:
    for tensors in zip(*held, strict=True):
        if tensors[0].is_floating_point() or tensors[0].is_complex():
            mean = torch.stack(
                [
                    weight * t.double() if not t.is_complex() else weight * t
                    for weight, t in zip(weights, tensors, strict=True)
                ]
            ).sum(0)
            for tensor in tensors:
                tensor.copy_(mean)
