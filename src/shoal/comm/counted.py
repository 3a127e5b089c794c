"""The base class of counted process groups: an axis, a label, and the Book that counts its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comm.wire import Algorithm

REFUSED = ("split_group", "merge_remote_group")
"""Refused, because they would create groups that are not counted; `dist.new_group` creates counted ones."""


class NoSuchAlgorithm(ValueError):
    """A backend with a single all-reduce algorithm was asked for another."""


class CountedGroup(dist.ProcessGroup):
    """A process group in Python that counts what it sends in this process's Book."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.axis = "world"
        """The axis of the strategy that it serves; set by the mesh."""
        self.label = name
        self.tag = 0
        """Tag of the next gathers: the shoal backend detects ranks that gather different tensors."""

    # Same values as in the base class, at a tenth of the cost; every collective reads them several times.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def register(self, backend: Any, device: torch.device) -> None:
        """Registers the backend below. Without one the group has no name, and collectives on it fail obscurely."""
        self.backend = backend
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(device, kind, backend)
        self._set_default_backend(kind)

    def prefer(self, algorithm: str) -> None:
        """Sets the algorithm of this group's all-reduces; "auto": the backend chooses."""
        if algorithm not in ("auto", "ring"):
            raise NoSuchAlgorithm(
                f'via=allreduce("{algorithm}"): the backend of this job has an algorithm of its own, a ring; use '
                "--backend shoal, or via=allreduce()"
            )

    def algorithm_of(self, kind: str, payload_bytes: int) -> Algorithm:
        """The algorithm of such a collective; None if there is only one."""
        return None

    def _enter(self, kind: str, payload_bytes: int, algorithm: Algorithm = None) -> None:
        BOOK.enter(
            axis=self.axis,
            kind=kind,
            payload_bytes=payload_bytes,
            ranks=self._size,
            group=self.label,
            algorithm=algorithm,
        )


def _refused(method: str) -> Callable[..., Any]:
    def call(self: CountedGroup, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{method} would make a group that the ledger does not see; use torch.distributed.new_group")

    call.__name__ = method
    return call


for _method in REFUSED:
    setattr(CountedGroup, _method, _refused(_method))
