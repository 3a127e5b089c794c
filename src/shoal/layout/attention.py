"""One call of attention over a cut sequence, as one rank sees it: what the formulas for its traffic read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """`length` counts the rank's own positions, heads those before any exchange."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    value_dim: int
    itemsize: int
    trained: bool = True
    again: bool = False
    """Whether it is a repetition inside backward."""
    evaluating: bool = False

    @property
    def queries(self) -> int:
        return self.batch * self.heads * self.length * self.head_dim

    @property
    def keys_and_values(self) -> int:
        return self.batch * self.kv_heads * self.length * (self.head_dim + self.value_dim)

    @property
    def output(self) -> int:
        return self.batch * self.heads * self.length * self.value_dim
