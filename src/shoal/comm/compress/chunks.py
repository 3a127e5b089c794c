"""The largest elements of every chunk of a tensor, with places inside the chunk: those of a chunk of 4,096 take 12 bits
where places in the tensor take 32. The values that are sent are quantised in turn.

A subclass may turn chunks into coefficients before the choice (`turned`, `turned_back`). The residual is what was
taken up less what the payload decodes to, so it holds the error of the value code as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.sizes import divided_up, kept_count
from shoal.strategy.terms.term import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shoal.comm.compress.given import Draw

CODES = ("none", "twobit", "e3m0", "int8")
"""What values may be sent in: as they are, or by one of these compressors."""


class Chunks(NamedTuple):
    """How a tensor is cut and what of it is sent."""

    fraction: float
    size: int
    """Elements of a chunk."""
    code: str

    @property
    def place_bits(self) -> int:
        return (self.size - 1).bit_length()

    def counts(self, num_elements: int) -> tuple[int, int, int]:
        """Full chunks, the elements sent of each, and those sent of the last one, which is short (or missing)."""
        full, rest = divmod(num_elements, self.size)
        return full, kept_count(self.fraction, self.size), kept_count(self.fraction, rest) if rest else 0


class ChunkCompressor(Compressor):
    """Top-k of each chunk."""

    family = "compress"

    def chunks(self) -> Chunks:
        """What a term's arguments say of it."""
        raise TypeError(f"{self} does not define its chunks")

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """[chunks, chunk] as coefficients; an orthonormal map."""
        return rows

    def turned_back(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        return rows

    def payload_bytes(self, num_elements: int, itemsize: int, *, step: int = 0) -> int | None:
        full, each, last = self.chunks().counts(num_elements)
        places = self.chunks().place_bits * divided_up(full * each + last, 8)
        return places + self._value_bytes(full * each + last, itemsize)

    def _value_bytes(self, count: int, itemsize: int) -> int:
        coded = self._coder.payload_bytes(count, itemsize) if self._coder else None
        return count * itemsize if coded is None else coded

    @property
    def _coder(self) -> Compressor | None:
        coder = REGISTRY[self.chunks().code]()
        return coder if isinstance(coder, Compressor) else None

    def encode(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Places in their chunks, then the values."""
        import torch

        from shoal.comm.compress.blocks import in_blocks
        from shoal.comm.compress.largest import largest_of_rows
        from shoal.comm.compress.payload import laid_out, packed_numbers

        chunks = self.chunks()
        full, each, last = chunks.counts(len(x))
        rows = self.turned(in_blocks(x, chunks.size))
        parts = [(rows[:full], each), (rows[full:], last)]
        found = [(part, largest_of_rows(part, count)) for part, count in parts if len(part)]
        places = torch.cat([places.reshape(-1) for _, places in found]).int()
        values = torch.cat([part.gather(1, places).view(-1) for part, places in found])
        coded = values if self._coder is None else self._coder.encode(values, draw)
        return laid_out(packed_numbers(places, chunks.place_bits), coded)

    def parts(
        self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Coefficients and their places in the tensor, filled up to full chunks."""
        import torch

        from shoal.comm.compress.payload import Reader, unpacked_numbers

        chunks = self.chunks()
        full, each, last = chunks.counts(num_elements)
        count, reader = full * each + last, Reader(payload)
        packed = reader.take(chunks.place_bits * divided_up(count, 8), torch.uint8)
        places = unpacked_numbers(packed, chunks.place_bits, count).long()
        starts = torch.arange(full + (last > 0), device=payload.device).mul_(chunks.size)
        sizes = torch.full_like(starts, each)
        if last:
            sizes[-1] = last
        places += starts.repeat_interleave(sizes, output_size=count)
        if self._coder is None:
            return reader.take(count, dtype), places
        sent = reader.take(self._value_bytes(count, dtype.itemsize), torch.uint8)
        return self._coder.decode(sent, count, dtype, draw), places

    def decode(self, payload: torch.Tensor, num_elements: int, dtype: torch.dtype, draw: Draw) -> torch.Tensor:
        return self.added([payload], payload.new_empty(num_elements, dtype=dtype), draw)

    def added(self, payloads: Sequence[torch.Tensor], like: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Summed as coefficients, which are turned back once."""
        size = self.chunks().size
        rows = like.new_zeros(divided_up(len(like), size), size)
        for payload in payloads:
            values, places = self.parts(payload, len(like), like.dtype, draw)
            rows.view(-1).index_add_(0, places, values)
        return self.turned_back(rows).reshape(-1)[: len(like)]
