"""The level below: where offloaded bytes wait, and how they travel.

A `LowerRange` is a range of bytes there. It can always be read as a tensor (`LowerRange.tensor`: pages of a file, or
host memory), so checkpoints and proofs need not know that a value is offloaded. A step does not go that way: it moves
ranges between the place and memory of its own, while it computes. On disk two threads do so, one that reads and one
that writes, past the mapping, so that no page of the file counts as this process's memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shoal.job.on_disk import folder_for_tensors, registered


class NoRoomBelow(OSError):
    """The level below cannot hold what is to be offloaded."""

    for_user = True


class LowerRange:
    """A range of bytes at the level below."""

    def __init__(self, level: MemoryLevel, start: int, nbytes: int, tensor: torch.Tensor | None) -> None:
        self.level, self.start, self.nbytes = level, start, nbytes
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes, to be read and written slowly and at any time."""
        assert self._tensor is not None, "this place was reserved without a tensor"
        return self._tensor

    def read(self, offset: int, into: torch.Tensor) -> Moving:
        """Starts to fill a tensor of bytes with what lies from `offset` on."""
        return self.level.read(self, offset, into)

    def write(self, offset: int, values: torch.Tensor) -> Moving:
        """Starts to put a tensor of bytes there; it must not be changed until that is done."""
        return self.level.write(self, offset, values)

    def view(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The bytes from `offset` on as a tensor of the type and shape of another."""
        nbytes = like.numel() * like.element_size()
        return self.tensor[offset : offset + nbytes].view(like.dtype).view(like.shape)


class Moving(ABC):
    """Bytes on their way."""

    @abstractmethod
    def wait(self) -> None:
        """Until they have arrived."""


class MemoryLevel(ABC):
    """Host memory below a device, or a disk below a host. `read` and `write` return at once; those of one kind happen
    in the order of their calls."""

    name = ""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = self.held_bytes = 0
        self.waited_s = 0.0
        """Seconds that steps have waited for bytes on their way."""

    @abstractmethod
    def reserve(self, nbytes: int, *, mapped: bool = True) -> LowerRange:
        """Room for some bytes; without `mapped` it can be moved from and to only, and has no tensor."""

    @abstractmethod
    def read(self, place: LowerRange, offset: int, into: torch.Tensor) -> Moving:
        """Fills a tensor of bytes from a place."""

    @abstractmethod
    def write(self, place: LowerRange, offset: int, values: torch.Tensor) -> Moving:
        """Puts a tensor of bytes into a place; it must not be changed until that is done."""

    def wait(self, moving: Moving) -> None:
        """Waits, and counts how long."""
        started = time.perf_counter()
        moving.wait()
        self.waited_s += time.perf_counter() - started

    def leave_pages(self) -> None:  # noqa: B027
        """What was read slowly no longer counts as this process's memory."""

    def close(self) -> None:  # noqa: B027
        """Nothing moves from here on."""


class _OfThread(Moving):
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class DiskLevel(MemoryLevel):
    """An unlinked file in TMPDIR (or /var/tmp), which ends with this process. What of it the host keeps in its cache is
    the host's choice: that memory is given up where programs need it."""

    name = "disk"
    past_cache = False
    """Whether what is written is on the disk before it counts as written, and leaves the host's cache: as where other
    programs need the memory of the cache; for measurements."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = str(folder_for_tensors())
        self._file: int | None = None
        self._end = 0
        self._mapped: list[mmap.mmap] = []
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="offload-read")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="offload-write")

    def _opened(self) -> int:
        if self._file is None:
            try:
                self._file = os.open(self._folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                    raise NoRoomBelow(f"offload: {self._folder}: {error.strerror}; set TMPDIR") from error
                import tempfile

                self._file, path = tempfile.mkstemp(dir=self._folder)
                os.unlink(path)
        return self._file

    def reserve(self, nbytes: int, *, mapped: bool = True) -> LowerRange:
        file, start = self._opened(), self._end
        length = -(-max(nbytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(file, start, length)  # A full disk is found here, not in the middle of a step.
        except OSError as error:
            raise NoRoomBelow(
                f"offload: {nbytes / 1e6:,.0f} MB more do not fit on the disk of {self._folder}, where "
                f"{start / 1e6:,.0f} MB are offloaded ({error.strerror}); set TMPDIR to a folder with room"
            ) from error
        self._end, self.held_bytes = start + length, self.held_bytes + nbytes
        if not mapped:
            return LowerRange(self, start, nbytes, None)
        held = mmap.mmap(file, length, offset=start)
        self._mapped.append(held)
        return LowerRange(self, start, nbytes, registered(held, 0, nbytes))

    def read(self, place: LowerRange, offset: int, into: torch.Tensor) -> Moving:
        self.read_bytes += into.numel()
        return self._by(self._readers, os.preadv, place.start + offset, into)

    def write(self, place: LowerRange, offset: int, values: torch.Tensor) -> Moving:
        self.written_bytes += values.numel()
        return self._by(self._writers, os.pwritev, place.start + offset, values)

    def _by(self, threads: ThreadPoolExecutor, move: Callable[..., int], start: int, tensor: torch.Tensor) -> Moving:
        file = self._opened()

        def moved() -> None:
            # Not `tensor.numpy()`, after which PyTorch no longer frees a storage on request.
            left, at = memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B"), start
            nbytes = len(left)
            while left:
                done = move(file, [left], at)
                if not done:
                    raise NoRoomBelow(f"offload: the file in {self._folder} ends before what was offloaded to it")
                left, at = left[done:], at + done
            if self.past_cache and threads is self._writers:
                os.fdatasync(file)
                os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)

        return _OfThread(threads.submit(moved))

    def leave_pages(self) -> None:
        for held in self._mapped:
            held.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class HostLevel(MemoryLevel):
    """Host memory below a device: pinned, so that copies of it are made by the device beside its computing. Between
    two tensors of the host it copies at once, which gains nothing and is for tests."""

    name = "host"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._stream: Any = None if device.type == "cpu" else torch.Stream(device)

    def reserve(self, nbytes: int, *, mapped: bool = True) -> LowerRange:
        self.held_bytes += nbytes
        return LowerRange(self, 0, nbytes, torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None))

    def read(self, place: LowerRange, offset: int, into: torch.Tensor) -> Moving:
        self.read_bytes += into.numel()
        return self._copied(into, place.tensor[offset : offset + into.numel()])

    def write(self, place: LowerRange, offset: int, values: torch.Tensor) -> Moving:
        self.written_bytes += values.numel()
        return self._copied(place.tensor[offset : offset + values.numel()], values)

    def _copied(self, to: torch.Tensor, values: torch.Tensor) -> Moving:
        if self._stream is None:
            to.copy_(values)
            return _OfDevice(None, None)
        own = torch.accelerator.current_stream(self.device)
        self._stream.wait_stream(own)  # What is copied has been computed, and what is overwritten has been read.
        with self._stream:
            to.copy_(values, non_blocking=True)
            for tensor in (to, values):
                if tensor.device.type != "cpu":
                    tensor.record_stream(self._stream)
        return _OfDevice(self._stream.record_event(), own)


class _OfDevice(Moving):
    def __init__(self, event: Any, stream: Any) -> None:
        self._event, self._stream = event, stream

    def wait(self) -> None:
        if self._event is not None:
            # The device waits, not the host; but pinned memory that the host will read must have arrived.
            self._stream.wait_event(self._event)
            self._event.synchronize()
