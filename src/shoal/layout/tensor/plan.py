"""What tensor parallelism can split in a model: regions between columns and rows, and the vocabulary.

A region begins with projections whose *output* is split (columns), continues with code that treats the split dimension
part by part (heads, activations, channels), and ends with projections whose *input* is split (rows), whose results
are partial sums. `layout/tensor/roles.py` finds the regions, `parallel/tensor/cut.py` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.layout.cuts import Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizedView:
    """A call in a module's code that names a full size, to be divided by the degree: `view(B, T, C)`."""

    module: str
    order: int
    """Its number among the calls that name sizes, in one call of the module."""
    function: str
    num_sizes: int
    places: tuple[int, ...]
    """Which of the sizes it names are divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Column-parallel projections, the code after them, row-parallel projections."""

    kind: str
    """"heads", "features" or "channels": what is split."""
    parts: int
    """Largest number of equal parts; a degree must divide it. (The greatest common divisor of all sizes in the region:
    heads, key-value heads, columns of each segment.)"""
    columns: tuple[str, ...]
    """Paths of the modules whose output is split. Columns that read the same tensor share one sum of its gradient."""
    rows: tuple[str, ...]
    """Paths of the modules whose input is split and whose output is a partial sum."""
    cuts: dict[str, Cut]
    """Every parameter and buffer that is split, by name: weights and biases of columns, weights of rows, and those of
    the split dimension in between (a norm over channels, a slope for each head)."""
    scaled: tuple[tuple[str, str], ...] = ()
    """(module path, integer attribute) that the model's own code reads as a size and that must be divided by the
    degree: the number of heads, the width at which a fused projection is split."""
    views: tuple[ResizedView, ...] = ()
    """Sizes that the model's code takes from its input or contains as constants, and that must be divided as well."""
    partial: tuple[str, ...] = ()
    """Replicated parameters that are read together with parts (a norm over the width of each head): each rank's
    gradient of them is one term of a sum over the axis."""
    entry: str | None = None
    """The module around all columns whose input they read: the input can be gathered there once."""


def sizes_known_inside(region: Region) -> bool:
    """Whether code that names sizes in its views sees the same input as the columns, even if the stream between
    regions is split. (To split one dimension, no other need be named.)"""
    named = [view.module for view in region.views if view.function not in ("unflatten", "split")]
    within = f"{region.entry}." if region.entry else ""
    return all(region.entry is not None and f"{path}.".startswith(within) for path in named)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """An embedding split by tokens of the vocabulary, and the projection onto the same vocabulary."""

    embeddings: tuple[str, ...]
    """Paths of embeddings whose rows are split."""
    heads: tuple[str, ...]
    """Paths of projections onto the vocabulary, whose output is split."""
    cuts: dict[str, Cut]
    loss_parallel: bool
    """Whether the loss can be computed on split logits: they are read only by a cross entropy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """All regions, the vocabulary, and what stays unsplit."""

    regions: tuple[Region, ...]
    vocabulary: Vocabulary | None = None
    whole: dict[str, str] = field(default_factory=dict)
    """Path of each projection that stays unsplit -> why."""
    sequence_dim: int | None = None
    """The dimension along which the residual stream can be split between regions; None: it cannot."""
    tokens: int = 0
    """Size of that dimension in the trace."""
    why_no_sequence: str = ""
