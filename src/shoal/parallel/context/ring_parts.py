"""Which rows attend to which columns when the keys of another rank pass by: the work of ring attention, as ranges.

Under a causal mask, chunk pairs that lie wholly in the future are left out; with the balanced cut
(`sequence.py`) that leaves every rank the same work with every visitor. A mask given as a tensor is looked at
too, so that one that happens to be causal, or that hides padding, saves the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.parallel.context.chunk_attention import MINUS_INFINITY, seen
from shoal.parallel.context.sequence import chunks_of, positions


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPart:
    """Rows of this rank that attend to columns of a visitor, both counted within what a rank holds."""

    rows: slice
    columns: slice
    causal: bool = False
    """On the diagonal: the i-th row sees the columns 0 to i."""


def part_of(*, source: int, index: int, length: int, causal: bool, balanced: bool) -> RingPart | None:
    """What rank `index` computes with the keys of rank `source`, both holding `length` positions; None for nothing."""
    full = slice(0, length)
    if not causal:
        return RingPart(rows=full, columns=full)
    if source == index:
        # What a rank holds ascends, so its own keys are one diagonal, whether they are one chunk or two.
        return RingPart(rows=full, columns=full, causal=True)
    if not balanced:
        return RingPart(rows=full, columns=full) if source < index else None
    # Of two ranks the lower one holds the earlier first chunk and the later second chunk.
    half = length // 2
    if source < index:
        return RingPart(rows=full, columns=slice(0, half))
    return RingPart(rows=slice(half, length), columns=full)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The part with one visitor, and the mask over it."""

    part: RingPart
    mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPlan:
    """What one rank of a ring computes. `length` counts the positions that each rank holds."""

    ranks: int
    index: int
    length: int
    causal: bool
    balanced: bool

    def work(self, source: int, mask: torch.Tensor | None) -> Work | None:
        """With the keys of `source`, under an effective mask [B or 1, H or 1, length or 1, ranks * length]."""
        part = part_of(source=source, index=self.index, length=self.length, causal=self.causal, balanced=self.balanced)
        if part is None:
            return None
        if mask is None:
            return Work(part=part, mask=None)
        over = self._columns(mask, source)[..., part.columns]
        over = over[:, :, part.rows] if over.shape[2] > 1 else over
        return _narrowed(part, over)

    def kept(self, kept: torch.Tensor | None, source: int, part: RingPart) -> torch.Tensor | None:
        """Of the factors that dropout gives attention weights, [B, H, length, ranks * length], those of one part."""
        if kept is None:
            return None
        return self._columns(kept, source)[..., part.columns][:, :, part.rows]

    def effective(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask together with the causal one where both hold, and -inf wherever it comes to the same.

        Many models write the lowest finite number for what is hidden. Where a row has anything else to see that is a
        weight of exactly 0, and need not be computed.
        """
        if mask is None:
            return None
        hidden = None
        if self.causal:
            full = self.ranks * self.length
            rows = positions(full, self.ranks, self.index, balanced=self.balanced, device=mask.device)
            hidden = torch.arange(full, device=mask.device) > rows[:, None]
        if mask.dtype == torch.bool:
            return mask if hidden is None else mask & ~hidden
        mask = mask if hidden is None else mask.masked_fill(hidden, MINUS_INFINITY)
        lowest = torch.finfo(mask.dtype).min / 2
        sees_more = mask.amax(-1, keepdim=True) > lowest
        return mask.masked_fill((mask < lowest) & sees_more, MINUS_INFINITY)

    def add_mask_gradient(self, total: torch.Tensor, source: int, work: Work, grad_scores: torch.Tensor) -> None:
        """Adds the gradient of a part's scores [B, H, rows, columns] to that of the full mask."""
        rows = work.part.rows if total.shape[2] > 1 else slice(0, 1)
        target = total[:, :, rows]
        held = positions(self.ranks * self.length, self.ranks, source, balanced=self.balanced, device=total.device)
        grad = grad_scores.sum_to_size(*target.shape[:3], grad_scores.shape[3])
        target.index_add_(3, held[work.part.columns], grad.to(total.dtype))

    def _columns(self, mask: torch.Tensor, source: int) -> torch.Tensor:
        chunks = [
            mask[..., chunk]
            for chunk in chunks_of(self.ranks * self.length, self.ranks, source, balanced=self.balanced)
        ]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, -1)


def _narrowed(part: RingPart, over: torch.Tensor) -> Work | None:
    """Without the rows and columns at the edges that the mask hides altogether."""
    live = seen(over).flatten(0, 1).any(0)
    rows, columns = _span(live.any(1)), _span(live.any(0))
    if rows is None or columns is None:
        return None
    inner = _within(part.columns, columns)
    if live.shape[0] == 1:
        return Work(part=RingPart(rows=part.rows, columns=inner), mask=over[..., columns])
    return Work(part=RingPart(rows=_within(part.rows, rows), columns=inner), mask=over[:, :, rows, columns])


def _span(live: torch.Tensor) -> slice | None:
    """From the first to the last True of a vector."""
    where = live.nonzero()
    return slice(int(where[0]), int(where[-1]) + 1) if len(where) else None


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)
