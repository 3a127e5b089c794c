"""Offloaded activations: what autograd saves in forward waits at the level below until backward asks for it.

    forward     block 1     block 2     block 3                         this thread
                            write 1     write 2     write 3             one thread
    backward                            block 3     block 2     block 1
                                        read 2      read 1              one thread

Storages are moved, not tensors: views that share one (queries, keys and values of one product) travel once, and come
back as views of one. What cannot go (parameters, buffers, what is small) stays. A storage whose backward comes before
its write has ended was never freed and is used as it is. So much may be on its way at a time, in both directions
together, that it takes a small part of what is offloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.parallel.offload.level import LowerRange, MemoryLevel, Moving
from shoal.parallel.runnable import NotRunnable

LEAST = 1 << 15
"""Bytes from which a storage is moved."""
SHARE = 24
"""On its way is at most this part of what a forward saves."""
FEWEST = 1 << 18
"""Bytes that may be on their way in any case."""
MOST_FORWARDS = 64
"""Whose order is known, to read ahead in backward: those under way in a pipeline."""


class _Stored:
    """One storage that autograd has saved."""

    def __init__(self, owner: OffloadedActivations, storage: torch.UntypedStorage, number: int) -> None:
        self.owner, self.nbytes, self.number = owner, storage.nbytes(), number
        self.device = storage.device
        self.storage: torch.UntypedStorage | None = storage
        """While its bytes are in memory and wanted: until they are written, and from when they are read."""
        self.back: StorageWeakRef | None = None
        """That which backward was given."""
        self.place: LowerRange | None = owner.take(self.nbytes)
        self.writing: Moving | None = self.place.write(0, _bytes(storage))
        self.reading: Moving | None = None

    def written(self) -> None:
        """It has arrived: its memory is autograd's no more."""
        assert self.writing is not None
        self.owner.level.wait(self.writing)
        self.writing = None
        self.storage = None

    def expect(self) -> None:
        """Starts to read it."""
        if self.storage is None and self.place is not None:
            self.storage = torch.UntypedStorage(self.nbytes, device=self.device)
            self.reading = self.place.read(0, _bytes(self.storage))

    def get(self) -> torch.UntypedStorage:
        """In memory. It is kept by whoever asked, so two that ask at a time get one."""
        if self.storage is None and self.back is not None and not self.back.expired():
            known = torch.UntypedStorage._new_with_weak_ptr(self.back.cdata)
            if known is not None:
                return known  # type: ignore[no-any-return]
        self.expect()
        assert self.storage is not None
        storage = self.storage
        if self.reading is not None:
            self.owner.level.wait(self.reading)
            self.reading = None
        if self.writing is None:
            self.back, self.storage = StorageWeakRef(storage), None
        self.owner.just_used(storage)
        return storage

    def __del__(self) -> None:
        for moving in (self.writing, self.reading):
            if moving is not None:
                moving.wait()
        if self.place is not None:
            self.owner.places.append(self.place)
            self.owner.live_bytes -= self.nbytes


@dataclass(frozen=True)
class _SavedActivation:
    """A tensor that autograd has saved, as a view of a storage."""

    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedActivations:
    """What forwards of one model save. Enter `saving()` around each forward and its loss."""

    def __init__(self, level: MemoryLevel, stay: Callable[[], Iterable[torch.Tensor]]) -> None:
        """`stay`: the tensors that are not activations, parameters and buffers, as they are now."""
        self.level, self._stay = level, stay
        self.places: list[LowerRange] = []
        """Free ones."""
        self.live_bytes = self.most_bytes = 0
        """Offloaded now, and at most."""
        self.seen_bytes = 0
        """What forwards have saved, small things included, in the largest step so far."""
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, ReferenceType[_Stored]]] = {}
        self._kept: set[int] = set()
        self._way: deque[_Stored] = deque()
        self._way_bytes = 0
        self._forwards: deque[list[ReferenceType[_Stored]]] = deque()
        self._used: deque[torch.UntypedStorage] = deque()
        """The last that backward was given: what several operations have saved is asked for several times."""
        self._largest = 0
        self._tried = False

    @contextmanager
    def saving(self, batch: Iterable[Any], *, again: bool = False) -> Iterator[None]:
        """Around a forward of a batch. `again`: its loss, which is a part of the same one."""
        if not torch.is_grad_enabled():
            yield
            return
        if not again or not self._forwards:
            given = [entry for entry in batch if isinstance(entry, torch.Tensor)]
            self._kept = {tensor.untyped_storage()._cdata for tensor in (*self._stay(), *given)}
            self._known.clear()
            self._forwards.append([])
            while len(self._forwards) > MOST_FORWARDS:
                self._forwards.popleft()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def end_step(self) -> None:
        """No backward is to come."""
        self._known.clear()
        self._forwards.clear()
        self._used.clear()
        self._drain(0)
        if not self._tried and self.seen_bytes:
            self._tried = True
            if self.most_bytes <= self.on_way_bytes:
                raise NotRunnable(
                    f'offload("activations"): nothing to gain: a rank keeps {self.seen_bytes:,} bytes of them in a '
                    f"step, {self.most_bytes:,} of them in tensors of at least {LEAST:,} bytes, and "
                    f"{self.on_way_bytes:,} would stay in memory to move these; leave it out"
                )

    def just_used(self, storage: torch.UntypedStorage) -> None:
        self._used.append(storage)
        while len(self._used) > 1 and sum(each.nbytes() for each in self._used) > self.on_way_bytes // 2:
            self._used.popleft()

    def take(self, nbytes: int) -> LowerRange:
        """Room below, that of something that was freed if it is not much too large."""
        self.live_bytes += nbytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        fitting = [place for place in self.places if nbytes <= place.nbytes <= 2 * nbytes]
        if not fitting:
            return self.level.reserve(nbytes, mapped=False)
        place = min(fitting, key=lambda place: place.nbytes)
        self.places.remove(place)
        return place

    @property
    def on_way_bytes(self) -> int:
        """That may be on their way at a time."""
        return max(FEWEST, 2 * self._largest, self.most_bytes // SHARE)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage() if _movable(tensor) else None
        if storage is None or storage._cdata in self._kept:
            return tensor
        key = storage._cdata, tensor._version
        weak, known = self._known.get(key, (None, None))
        stored = known() if known is not None and weak is not None and not weak.expired() else None
        if stored is None:
            if not self._tried:
                self.seen_bytes += storage.nbytes()
            if storage.nbytes() < LEAST:
                return tensor
            stored = _Stored(self, storage, len(self._forwards[-1]))
            self._largest = max(self._largest, stored.nbytes)
            self._forwards[-1].append(ref(stored))
            self._known[key] = StorageWeakRef(storage), ref(stored)
            self._way.append(stored)
            self._way_bytes += stored.nbytes
            self._drain(self.on_way_bytes // 2)
        return _SavedActivation(stored, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _drain(self, most: int) -> None:
        """Waits until at most so much is being written."""
        while self._way and self._way_bytes > most:
            oldest = self._way.popleft()
            self._way_bytes -= oldest.nbytes
            if oldest.writing is not None:
                oldest.written()

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedActivation):
            return saved  # type: ignore[no-any-return]
        storage = saved.stored.get()
        self._expect_before(saved.stored)
        empty = torch.empty(0, dtype=saved.dtype, device=saved.stored.device)
        return empty.set_(storage, saved.offset, saved.size, saved.stride)  # type: ignore[call-overload, no-any-return]

    def _expect_before(self, stored: _Stored) -> None:
        """Backward goes the other way: what was saved before is read next."""
        row = next((row for row in self._forwards if stored.number < len(row) and row[stored.number]() is stored), None)
        ahead = 0
        for each in reversed(row[: stored.number]) if row is not None else ():
            before = each()
            if before is None:
                continue
            ahead += before.nbytes
            if ahead > max(self.on_way_bytes // 2, before.nbytes):
                return
            before.expect()


def _movable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return plain and not tensor.is_conj() and not tensor.is_neg()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
