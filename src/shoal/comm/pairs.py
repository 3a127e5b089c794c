"""Exchanges of two ranks at a time, without an order among them: one asks with its message, the other answers.

Ranks that ask wait for an answer; ranks that answer wait for no other rank, so no two ever wait for each other. That is
why every pair has one rank of each kind (AD-PSGD: the graph is bipartite). Both sides are generators that yield the
task they wait for: a rank waits in its own way, and a test runs many ranks in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from shoal.comm.point_to_point import ANY, PointToPoint
from shoal.comm.progress import Task
from shoal.comm.vector import Vector
from shoal.common.numbers import packed_bytes

ASK, ANSWER = 1 << 24, (1 << 24) + 1
"""Tags that nothing else in a group uses."""


class PackedMessage:
    """One message of several tensors and a few numbers, which are views of its memory."""

    def __init__(self, like: Sequence[torch.Tensor], *, numbers: int) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        self.memory = torch.zeros(packed_bytes(sizes, numbers=numbers), dtype=torch.uint8)
        self.numbers = self.memory[: 8 * numbers].view(torch.float64)
        self.tensors: list[torch.Tensor] = []
        at = packed_bytes((), numbers=numbers)
        for tensor, size in zip(like, sizes, strict=True):
            self.tensors.append(self.memory[at : at + size].view(tensor.dtype))
            at += packed_bytes((size,))
        self.vector = Vector(self.memory)

    def fill(self, numbers: Sequence[float], tensors: Sequence[torch.Tensor]) -> PackedMessage:
        for at, number in enumerate(numbers):
            self.numbers[at] = number
        for place, tensor in zip(self.tensors, tensors, strict=True):
            place.copy_(tensor.reshape(-1))
        return self


def ask(messages: PointToPoint, partner: int, question: PackedMessage, reply: PackedMessage) -> Iterator[Task]:
    """Sends a message to a rank and receives its answer."""
    coming = messages.receive(partner, ANSWER, reply.vector, background=False)
    yield messages.send(partner, ASK, question.vector, background=False)
    yield coming


def answers(
    messages: PointToPoint,
    question: PackedMessage,
    reply: Callable[[int, PackedMessage], PackedMessage],
    *,
    background: bool = True,
) -> Iterator[Task]:
    """Answers whatever rank asks, one after the other and without end; `reply(rank, question)` is what it is sent.
    `background`: messages move while no thread waits for them."""
    while True:
        asked = messages.receive(ANY, ASK, question.vector, background=background)
        yield asked
        if asked.error is None:
            yield messages.send(asked.source, ANSWER, reply(asked.source, question).vector, background=background)
