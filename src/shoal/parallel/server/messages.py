"""What workers and servers send each other: short vectors of numbers, and tensors of agreed sizes; no pickle.

Messages go through two groups of all ranks, one for each direction, since a thread that waits for the messages of a
group also moves those of other threads. What a server waits for has one tag, INBOX, and one size; tensors have a tag
for each part of the model. State that is of no agreed size (a checkpoint) is a JSON table and its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from shoal.comm.backend import ShoalGroup
from shoal.comm.ledger import Book
from shoal.comm.point_to_point import ANY, PostedReceive
from shoal.comm.vector import Vector

INBOX, REPLY, LIFE, TABLE, DATA = 1, 2, 3, 4, 100
"""Tags. LIFE: a receive that only ends when its worker does. DATA and more: the parts of the model."""
WAIT_S = 1e6


class Kind(IntEnum):
    """What a message in a server's inbox is."""

    LOAD = 1
    FETCH = 2
    ASK = 3
    PUSH = 4
    BYE = 5
    PREPARE = 6
    READY = 7
    COMMIT = 8
    READ = 9
    DROP = 10


FIELDS = (
    "kind",
    "worker",
    "step",
    "share",
    "version",
    "number",
    "count",
    "limit",
    "stop",
    "lr_factor",
    "squares",
    "missing",
    "scale",
    "has_ticket",
    "position",
    "norm",
)
"""HEADER_NUMBERS of them. The pushes of an update, four numbers each, and the mask of used parameters follow."""


class Message(dict[str, float]):
    """The fields of a message by name, and what follows them."""

    rest: list[float]

    def __init__(self, kind: Kind | int = 0, rest: Sequence[float] = (), **fields: float) -> None:
        super().__init__(dict.fromkeys(FIELDS, 0.0) | {"kind": float(kind)} | {k: float(v) for k, v in fields.items()})
        self.rest = list(rest)

    def whole(self, name: str) -> int:
        return int(self[name])

    def tensor(self, size: int) -> torch.Tensor:
        values = [self[name] for name in FIELDS] + self.rest
        return torch.tensor(values + [0.0] * (size - len(values)), dtype=torch.float64)

    @staticmethod
    def of(tensor: torch.Tensor) -> Message:
        values = tensor.tolist()
        return Message(rest=values[len(FIELDS) :], **dict(zip(FIELDS, values, strict=False)))


class Post:
    """One direction of messages between all ranks."""

    def __init__(self, group: Any, book: Book | None = None) -> None:
        assert isinstance(group, ShoalGroup)
        self.group, self.messages, self.book = group, group.messages, book

    def send(self, to: int, tag: int, tensor: torch.Tensor) -> Any:
        """Sends in the background; the tensor must not change until it is sent."""
        data = Vector(tensor.detach().reshape(-1))
        if self.book is not None and to != self.group.rank():
            self.book.enter(
                axis=self.group.axis,
                kind="send",
                payload_bytes=data.nbytes,
                ranks=self.group.size(),
                group=self.group.label,
            )
        return self.messages.send(to, tag, data, background=True)

    def receive(self, source: int, tag: int, tensor: torch.Tensor) -> PostedReceive:
        return self.messages.receive(source, tag, Vector(tensor.detach().view(-1)), background=True)

    def wait(self, task: Any) -> None:
        self.messages.wait(task, WAIT_S)

    def any_source(self, tag: int, tensor: torch.Tensor) -> PostedReceive:
        return self.receive(ANY, tag, tensor)

    def send_table(self, to: int, table: Any, tensors: Sequence[torch.Tensor]) -> None:
        """A JSON value and tensors that the other side has no sizes of."""
        sized = {"table": table, "tensors": [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]}
        text = torch.frombuffer(bytearray(json.dumps(sized).encode()), dtype=torch.uint8)
        tasks = [self.send(to, TABLE, torch.tensor([text.numel()])), self.send(to, TABLE, text)]
        tasks += [self.send(to, TABLE, tensor.contiguous()) for tensor in tensors if tensor.numel()]
        for task in tasks:
            self.wait(task)

    def receive_table(self, source: int) -> tuple[Any, list[torch.Tensor]]:
        size = torch.zeros(1, dtype=torch.int64)
        self.wait(self.receive(source, TABLE, size))
        text = torch.empty(int(size), dtype=torch.uint8)
        self.wait(self.receive(source, TABLE, text))
        sized = json.loads(text.numpy().tobytes())
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in sized["tensors"]]
        for tensor in tensors:
            if tensor.numel():
                self.wait(self.receive(source, TABLE, tensor))
        return sized["table"], tensors
