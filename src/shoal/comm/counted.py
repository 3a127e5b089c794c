"""What every counted process group has: an axis, a label, and the Book into which its collectives are entered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.ledger import BOOK
from shoal.comm.wire import Algorithm

REFUSED = ("split_group", "merge_remote_group")
"""They would make groups that nobody counts; `dist.new_group` makes ones that are counted."""


class NoSuchAlgorithm(ValueError):
    """A backend that carries all-reduces in one way was asked for another."""


class CountedGroup(dist.ProcessGroup):
    """A process group written in Python that enters what it sends into this process's Book."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.axis = "world"
        """The axis of the strategy that it serves; the mesh says which."""
        self.label = name
        self.tag = 0
        """What the next gathers are of: the shoal backend finds ranks that gather different things."""

    # As the base class has them, at a tenth of what it costs to ask there; every call asks several times.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def register(self, backend: Any, device: torch.device) -> None:
        """Names the backend below. A group without one has no name, and collectives on it fail far from here."""
        self.backend = backend
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(device, kind, backend)
        self._set_default_backend(kind)

    def prefer(self, algorithm: str) -> None:
        """Names the algorithm of this group's all-reduces; "auto" leaves the choice to the backend."""
        if algorithm not in ("auto", "ring"):
            raise NoSuchAlgorithm(
                f'via=allreduce("{algorithm}"): the backend of this job has an algorithm of its own, a ring; use '
                "--backend shoal, or via=allreduce()"
            )

    def algorithm_of(self, kind: str, payload_bytes: int) -> Algorithm:
        """By which algorithm it carries such a collective; None where there is only one."""
        return None

    def _enter(self, kind: str, payload_bytes: int, algorithm: Algorithm = None) -> None:
        BOOK.enter(
            axis=self.axis, kind=kind, payload_bytes=payload_bytes, ranks=self._size, group=self.label,
            algorithm=algorithm,
        )  # fmt: skip


def _refused(method: str) -> Callable[..., Any]:
    def call(self: CountedGroup, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{method} would make a group that the ledger does not see; use torch.distributed.new_group")

    call.__name__ = method
    return call


for _method in REFUSED:
    setattr(CountedGroup, _method, _refused(_method))
