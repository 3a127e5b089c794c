"""How an operation is computed from parts of its operands, where that differs from how it was called.

A form is data: what each rank reads and makes along each cut dimension. `parallel/spatial/local.py` computes by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.layout.spatial.grid import DimWindow, Intervals


@dataclass(frozen=True, slots=True)
class AsCalled:
    """On the parts, with sizes in the arguments adapted."""


@dataclass(frozen=True, slots=True)
class Windowed:
    """A convolution or pooling: what lies beyond the edges is padding."""

    dims: tuple[DimWindow, ...]


@dataclass(frozen=True, slots=True)
class Padded:
    """Constant padding."""

    dims: tuple[DimWindow, ...]


@dataclass(frozen=True, slots=True)
class Taps:
    """Each output is a weighted sum of a few inputs along a dimension: resizing, slicing, mirroring."""

    axis: int
    dim: int
    out: Intervals
    have: Intervals
    rows: tuple[tuple[int, ...], ...]
    """For each tap and output, the input that it reads."""
    weights: tuple[tuple[float, ...], ...] | None
    """None: one tap with weight one."""


@dataclass(frozen=True, slots=True)
class Tapped:
    """Taps along the cut dimensions; along the others the operation itself, if there are any."""

    taps: tuple[Taps, ...]
    others: bool


@dataclass(frozen=True, slots=True)
class Bins:
    """Adaptive average pooling: the mean of an interval for each output."""

    dims: tuple[tuple[DimWindow, tuple[tuple[int, int], ...]], ...]
    """With the interval of each output of the full dimension."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pixel shuffling: each row in becomes `factor` rows out, or the reverse."""

    dims: tuple[DimWindow, ...]


@dataclass(frozen=True, slots=True)
class Summed:
    """Partial sums of each rank's part, added up over all ranks."""

    count: int = 0
    """Of a mean: its elements."""
    copies: int = 1
    """Ranks that hold the same part."""
    weighted: bool = False
    """Whether the first result is divided by the second one in the end."""


Form = AsCalled | Windowed | Padded | Tapped | Bins | Blocks | Summed
