"""What tensor parallelism may cut of a model: regions between columns and rows, and the vocabulary.

A region begins with projections whose *output* is cut (columns), goes through code that treats the cut dimension
part by part (heads, activations, channels), and ends with projections whose *input* is cut (rows), whose results
are partial sums. `layout/tensor/roles.py` finds the regions, `parallel/tensor/cut.py` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.layout.cuts import Cut


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizedView:
    """A call in a module's own code that names a size of the whole, to be divided by the degree: `view(B, T, C)`."""

    module: str
    order: int
    """Its number among the calls that name sizes, in one call of the module."""
    function: str
    num_sizes: int
    places: tuple[int, ...]
    """Which of the sizes it names are divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Columns, what lies between, rows."""

    kind: str
    """"heads", "features" or "channels": what is dealt out."""
    parts: int
    """Into how many equal parts it can be cut at most; a degree must divide it. (The greatest common divisor of
    everything along the way: heads, key-value heads, columns of each segment.)"""
    columns: tuple[str, ...]
    """Paths of the modules whose output is cut. Those of one region that read one tensor share its gradient's sum."""
    rows: tuple[str, ...]
    """Paths of the modules whose input is cut and whose output is a partial sum."""
    cuts: dict[str, Cut]
    """Every parameter and buffer that is cut, by name: weights and biases of columns, weights of rows, and what
    belongs to the cut dimension in between (a norm over channels, a slope for each head)."""
    scaled: tuple[tuple[str, str], ...] = ()
    """(module path, integer attribute) that the model's own code reads as a size and that must be divided by the
    degree: the number of heads, the width at which a fused projection is split."""
    views: tuple[ResizedView, ...] = ()
    """Sizes that the model's own code takes from its input, or has written down, and that must be divided as well."""
    partial: tuple[str, ...] = ()
    """Parameters that stay whole but are read together with parts (a norm over each head's own width): every rank's
    gradient of them is one term of a sum over the axis."""
    entry: str | None = None
    """The smallest module that holds all columns and nothing of the residual stream: its input may be gathered once."""


def sizes_known_inside(region: Region) -> bool:
    """Whether code that names sizes in its views sees its input as the columns do, also where the stream between
    regions is cut. (To split one dimension, no other need be named.)"""
    named = [view.module for view in region.views if view.function not in ("unflatten", "split")]
    within = f"{region.entry}." if region.entry else ""
    return all(region.entry is not None and f"{path}.".startswith(within) for path in named)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """An embedding cut by words, and the projection onto the same words."""

    embeddings: tuple[str, ...]
    """Paths of embeddings whose rows are cut."""
    heads: tuple[str, ...]
    """Paths of projections onto the vocabulary, whose output is cut."""
    cuts: dict[str, Cut]
    loss_parallel: bool
    """Whether the loss may be computed on logits that stay cut: they reach nothing but a cross entropy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """All of it, and what stays whole."""

    regions: tuple[Region, ...]
    vocabulary: Vocabulary | None = None
    whole: dict[str, str] = field(default_factory=dict)
    """Path of each projection that stays whole -> why."""
    sequence_dim: int | None = None
    """The dimension of the residual stream along which it may be cut between regions; None: it may not."""
    tokens: int = 0
    """How many there are along it, in the samples that were looked at."""
    why_no_sequence: str = ""
