"""A block of shared memory for all ranks of a group on one host, freed by the kernel without cleanup.

The first rank creates an anonymous file and sends the others its process id and descriptor; once all have mapped it,
the descriptor is closed. The file has no name, so the kernel frees it with the last process that maps it, however that
process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch
import torch.distributed as dist

from shoal.comm.mesh import Members
from shoal.comm.points import reach
from shoal.comm.transport.connect import host_name


class NotOneHost(ValueError):
    """The ranks that were to share memory are on different hosts."""


class SharedBlock:
    """A block of `nbytes` bytes, shared by all members. Collective."""

    def __init__(self, members: Members, nbytes: int, *, keep_open: bool = False) -> None:
        """`keep_open`: keeps the descriptor of the file, for locks on it."""
        self.descriptor = -1
        self._keep_open = keep_open
        self.members = members
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        if members.group is None:
            self._memory = mmap.mmap(-1, self.nbytes)
        else:
            self._memory = self._shared_with(members.group)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _shared_with(self, group: dist.ProcessGroup) -> mmap.mmap:
        self._require_one_host(group)
        first = self.members.ranks[0]
        place = torch.zeros(2, dtype=torch.int64)
        descriptor = -1
        if self.members.index == 0:
            descriptor = os.memfd_create("shoal-block", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, self.nbytes)
            place = torch.tensor([os.getpid(), descriptor])
        dist.broadcast(place, src=first, group=group)
        opened = -1
        try:
            if self.members.index:
                process, number = place.tolist()
                opened = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            return mmap.mmap(descriptor if self.members.index == 0 else opened, self.nbytes)
        finally:
            reach("start: shared block mapped")
            # No rank closes the file before all have mapped it.
            dist.barrier(group=group)
            held = max(descriptor, opened)
            if self._keep_open:
                self.descriptor = held
            elif held >= 0:
                os.close(held)

    def _require_one_host(self, group: dist.ProcessGroup) -> None:
        mine = torch.zeros(256, dtype=torch.uint8)
        name = host_name().encode()[:256]
        mine[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
        everyone = torch.empty(256 * self.members.size, dtype=torch.uint8)
        dist.all_gather_single(everyone, mine, group=group)
        for place, theirs in zip(self.members.ranks, everyone.view(-1, 256), strict=True):
            if not torch.equal(theirs, mine):
                raise NotOneHost(
                    f"via=shared() shares memory among ranks {', '.join(map(str, self.members.ranks))}, but rank "
                    f"{place} is on another host; put a level of dp(..., via=allreduce()) between hosts"
                )

    def lock(self, number: int) -> None:
        """Waits until no other rank holds this lock; the exit of a process releases it. Requires `keep_open`."""
        if self.members.group is not None:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, number)

    def unlock(self, number: int) -> None:
        if self.members.group is not None:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed with the last tensor in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def view(self) -> memoryview:
        return memoryview(self._memory)

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements from byte `start` of the block."""
        return self._tensor[start : start + count * dtype.itemsize].view(dtype)
