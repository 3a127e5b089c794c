"""Count sketch, as in Sketched-SGD (Ivkin et al. 2019): a table of rows x columns signed sums represents the gradient.

Sketches add: the all-reduced table is the sketch of the sum. Every rank reads the same estimates off it (the median
over rows), takes the columns / 4 largest of them, and the exact values at these places are summed in a second, small
all-reduce. Each rank's error is then what it did not send. The estimates themselves cannot replace the second
round: their noise, the norm of the gradient over sqrt(columns), would enter the residuals, and grow there from step to
step wherever the gradient is not sparse.

The hash functions are drawn anew for every step, alike on all ranks: two elements that collide today do not tomorrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from shoal.comm.compress.compressor import Compressor
from shoal.strategy.terms.arguments import integer
from shoal.strategy.terms.compress import Transfer

if TYPE_CHECKING:
    import torch

    from shoal.comm.compress.exchange import Total
    from shoal.comm.compress.given import Draw, Over, State

FEW_ROWS = 9
"""Up to here exchanging rows in a network is faster than sorting a column for each element."""


class sketch(Compressor):
    """A count sketch: a table of `rows` x `columns` random sums. Sketches add, so servers and trees can sum
    them.
    """

    rows: int = integer(1, 1024, sample=3)
    columns: int = integer(1, sample=4000)

    title = "count sketch"
    sends = "(rows columns + columns/4) s"
    within = 0.3
    passes = (206, 0)

    def words(self) -> str:
        return (
            f"a count sketch of {self.rows:,} x {self.columns:,} sums represents the gradient; sketches add, "
            "and the heavy elements are read back from the sum"
        )

    def transfers(
        self, shape: Sequence[int], itemsize: int, ranks: int, step: int, *, rank: int = 0
    ) -> list[Transfer] | None:
        sizes = (self.rows * self.columns, self.num_chosen(prod(shape)))
        return [Transfer("all_reduce", size * itemsize) for size in sizes]

    def num_chosen(self, num_elements: int) -> int:
        """How many elements are read back."""
        return max(1, min(num_elements, self.columns // 4))

    def total(self, value: torch.Tensor, shape: torch.Size, kept: State, over: Over, draw: Draw) -> Total:
        import torch

        from shoal.comm.compress.exchange import Sum
        from shoal.comm.compress.finite import is_finite, or_nan
        from shoal.comm.compress.largest import largest

        counted = CountSketch(
            rows=self.rows, columns=self.columns, num_elements=len(value), draw=draw, device=value.device
        )
        table = (yield Sum(counted.table(value))).view(self.rows, -1)
        finite = is_finite(table)
        if table.device.type == "cpu" and not finite:
            return torch.full_like(value, torch.nan)
        # In one order on all ranks, since values are summed by it.
        places = largest(counted.estimates(table), self.num_chosen(len(value))).sort().values
        exact = yield Sum(value[places])
        kept["residual"].index_fill_(0, places, 0.0)
        return or_nan(torch.zeros_like(value).index_copy_(0, places, exact), finite)


class CountSketch:
    """The linear map to a table and the estimates back, for one draw of hash functions. It works row by row, so that
    the hashes of one row are all that it holds. A sign is part of the cell: sums of plus and minus are separate."""

    def __init__(self, *, rows: int, columns: int, num_elements: int, draw: Draw, device: torch.device) -> None:
        import torch

        self.rows, self.columns = rows, columns
        limits = torch.iinfo(torch.int64)
        numbers = torch.randint(limits.min, limits.max, (2, rows), generator=draw.shared(), dtype=torch.int64)
        self._factors, self._shifts = numbers.bitwise_or(torch.tensor([[1], [0]])).tolist()
        self._elements = torch.arange(num_elements, device=device)

    def table(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, columns]: in each row every element is added to one cell, with a sign."""
        import torch

        rows = []
        for row in range(self.rows):
            plus, minus = x.new_zeros(2 * self.columns).scatter_add_(0, self._cells(row), x).view(2, self.columns)
            rows.append(plus - minus)
        return torch.stack(rows)

    def estimates(self, table: torch.Tensor) -> torch.Tensor:
        """What the elements probably were."""
        import torch

        return median([torch.cat([row, -row]).index_select(0, self._cells(at)) for at, row in enumerate(table)])

    def _cells(self, row: int) -> torch.Tensor:
        """Each element's cell in a row, counted on by the number of columns where its sign is minus: the upper half of
        a i + b modulo 2**64 (multiply-shift hashing, whose upper bits are pairwise independent), brought into range."""
        mixed = (self._elements * self._factors[row]).add_(self._shifts[row])
        return mixed.bitwise_right_shift_(32).mul_(2 * self.columns).bitwise_right_shift_(32).add_(self.columns)


def median(rows: list[torch.Tensor]) -> torch.Tensor:
    """The median of every element over rows (which are used up); of an even number the mean of the middle two."""
    import torch

    if len(rows) > FEW_ROWS:
        ordered = list(torch.stack(rows).sort(dim=0).values)
    else:
        ordered = rows
        for turn in range(len(rows)):
            # Odd-even transposition: after as many turns as rows everything is in its place.
            for first in range(turn % 2, len(rows) - 1, 2):
                low, high = ordered[first], ordered[first + 1]
                ordered[first], ordered[first + 1] = torch.minimum(low, high), torch.maximum(low, high, out=high)
    low, high = ordered[(len(rows) - 1) // 2], ordered[len(rows) // 2]
    return low if low is high else torch.lerp(low, high, 0.5)
