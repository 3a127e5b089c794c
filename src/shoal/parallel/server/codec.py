"""Compressed pushes: what a worker sends a server of each part of its gradient, and how the server reads it.

A part is a range of one bucket. Its compressible pieces travel as payloads of the level's method, the rest as it is,
all of a part in one message of a size that both sides know. The mean over the worker's own samples is compressed, and
the worker keeps what it did not send (error feedback). Random numbers depend on the worker and on the number of its
push.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from shoal.comm.compress import traffic
from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.finite import is_finite, or_nan
from shoal.comm.compress.given import Draw, Over
from shoal.comm.compress.method import Method
from shoal.comm.compress.payload import Reader, laid_out
from shoal.comm.mesh import Members
from shoal.parallel.compression import Compression, Fragment, working_type
from shoal.parallel.flat import Slot
from shoal.parallel.placement import Route

ALONE = Over()
"""A push is encoded by one rank; nothing is exchanged."""


class PartOfBucket:
    """Elements [start, stop) of a bucket's buffer, as `Compression` sees a bucket."""

    def __init__(
        self,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        start: int,
        stop: int,
        *,
        worker: int,
        workers: int,
        writes_errors: bool,
    ) -> None:
        self.buffer: Any = SimpleNamespace(slots=slots, dtype=dtype, device=torch.device("cpu"))
        self.compressed = slice(start, stop)
        self.writes_errors = writes_errors
        alone = Members("none", (0,), 0, None)
        # Every worker keeps an error of its own.
        self.route = Route(alone, Members("ps", tuple(range(workers)), worker, None), alone, False)


class PushCodec(Compression):
    """Of some parts of one position's gradient."""

    def __init__(self, parts: Sequence[PartOfBucket], term: Compressor, *, seed: int, clip: float | None) -> None:
        self.parts, self.term = list(parts), term
        super().__init__(parts, Method(term, clip=clip), seed=seed)  # type: ignore[arg-type]

    def pays(self, bucket: Any, shape: Sequence[int]) -> bool:
        return traffic.pays_to_push(self.term, shape, working_type(bucket.buffer.dtype).itemsize)

    @property
    def undecided(self) -> frozenset[tuple[str, str]]:
        return frozenset()

    def size(self, at: int, step: int) -> int:
        """Bytes of one part."""
        part = self.parts[at]
        ranges: list[tuple[int, int]] = list(self.dense_ranges(part))  # type: ignore[arg-type]
        dense = sum(high - low for low, high in ranges)
        return dense * part.buffer.dtype.itemsize + sum(self._sizes(at, step))

    def _sizes(self, at: int, step: int) -> list[int]:
        part = self.parts[at]
        itemsize = working_type(part.buffer.dtype).itemsize
        found = [
            self.term.pushed_bytes(each.stop - each.start, itemsize, step=step) for each in self.fragments[id(part)]
        ]
        return [size for size in found if size is not None]

    def encode(
        self, at: int, gradient: torch.Tensor, count: float, unused: frozenset[str], *, worker: int, step: int
    ) -> torch.Tensor:
        """The message of one part of a gradient, given as a sum over `count`. A parameter without a gradient sends
        zeros, and what is kept of it stays."""
        part = self.parts[at]
        low = part.compressed.start
        mean = gradient.to(working_type(gradient.dtype), copy=True).div_(count)
        dense = [mean[start - low : stop - low] for start, stop in self.dense_ranges(part)]  # type: ignore[arg-type]
        found = [torch.cat(dense).to(gradient.dtype)] if dense else []
        for each in self.fragments[id(part)]:
            draw = Draw(self.seed, step, each.key, worker)
            x = each.within(mean, low)
            if each.slot.name in unused:
                found.append(self.term.encode(torch.zeros_like(x), draw))
                continue
            found.append(self._encoded(each, x, draw))
        return laid_out(*found)

    def _encoded(self, each: Fragment, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        value, taken_up = self.term.take_up(x, each.state, ALONE, self.method.clip)
        finite = is_finite(value)
        value = or_nan(value, finite)
        payload = self.term.encode(value, draw)
        if finite:  # What overflowed leaves no trace, and the servers see NaN.
            kept = {**each.state, **taken_up}
            self.term.settle(kept, payload, draw)
            each.state.update(kept)
        return payload

    def decode(self, at: int, message: torch.Tensor, *, worker: int, step: int) -> torch.Tensor:
        """The mean gradient that a worker's message holds, in the type of the parameters."""
        part, reader = self.parts[at], Reader(message)
        dtype, low = part.buffer.dtype, part.compressed.start
        working = working_type(dtype)
        mean = torch.zeros(part.compressed.stop - low, dtype=working)
        ranges = list(self.dense_ranges(part))  # type: ignore[arg-type]
        rest = reader.take(sum(stop - start for start, stop in ranges), dtype)
        for (start, stop), values in zip(ranges, rest.split([stop - start for start, stop in ranges]), strict=True):
            mean[start - low : stop - low] = values
        for each, size in zip(self.fragments[id(part)], self._sizes(at, step), strict=True):
            into = each.within(mean, low)
            kind = working if self.term.adds else torch.uint8
            payload = reader.take(size // kind.itemsize, kind)
            draw = Draw(self.seed, step, each.key, worker)
            into.copy_(self.term.added([payload], into, draw))
        return mean.to(dtype)
