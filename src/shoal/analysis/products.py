"""Operators that are matrix products: fully connected layers, products of activations, attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.analysis.operator import Cost, Operator, Sides, log2_ceil, moved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FullyConnected(Operator):
    """A weight matrix on every row. Rows are samples, or samples times positions."""

    kind: ClassVar[str] = "fully connected"

    rows: int
    inputs: int
    outputs: int
    bias: bool = True
    tied: bool = False
    """Whether its matrix belongs to another layer."""

    @property
    def parameters(self) -> int:
        return (0 if self.tied else self.inputs * self.outputs) + (self.outputs if self.bias else 0)

    @property
    def shape(self) -> str:
        return f"{self.rows:,} x {self.inputs:,} -> {self.outputs:,}"

    @property
    def sides(self) -> Sides:
        return Sides(count=1, rows=self.rows, columns=self.outputs, inner=self.inputs)

    @property
    def _matrix(self) -> int:
        return self.inputs * self.outputs

    def forward(self) -> Cost:
        moved = moved_bytes(self.rows * self.inputs, self._matrix, self.rows * self.outputs)
        return Cost(self.sides.work, log2_ceil(self.inputs), moved)

    def input_gradient(self) -> Cost:
        moved = moved_bytes(self.rows * self.outputs, self._matrix, self.rows * self.inputs)
        return Cost(self.sides.work, log2_ceil(self.outputs), moved)

    def weight_gradient(self) -> Cost:
        moved = moved_bytes(self.rows * self.inputs, self.rows * self.outputs, self._matrix)
        return Cost(self.sides.work, log2_ceil(self.rows), moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixProduct(Operator):
    """A batch of products of activations, (rows x inner) times (inner x columns): nothing in it is learned."""

    kind: ClassVar[str] = "matrix product"

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def shape(self) -> str:
        return f"{self.batch:,} x ({self.rows:,} x {self.inner:,} x {self.columns:,})"

    @property
    def sides(self) -> Sides:
        return Sides(count=self.batch, rows=self.rows, columns=self.columns, inner=self.inner)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        left, right = self.rows * self.inner, self.inner * self.columns
        return self.batch * left, self.batch * right, self.batch * self.rows * self.columns

    def forward(self) -> Cost:
        return Cost(self.sides.work, log2_ceil(self.inner), moved_bytes(*self._sizes))

    def input_gradient(self) -> Cost:
        left, right, out = self._sizes
        depth = max(log2_ceil(self.rows), log2_ceil(self.columns))
        return Cost(2 * self.forward().work, depth, moved_bytes(2 * left, 2 * right, 2 * out))


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(Operator):
    """softmax(Q K^T) V for every head: two products and a softmax, whose two sums (maximum and total) count each
    score once. Scores need not be stored; a causal mask leaves half of them.
    """

    kind: ClassVar[str] = "attention"

    samples: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    causal: bool

    @property
    def shape(self) -> str:
        kv = f" ({self.kv_heads:,} of keys)" if self.kv_heads != self.heads else ""
        causal = ", causal" if self.causal else ""
        return (
            f"{self.samples:,} x {self.heads:,} heads{kv} x {self.queries:,} x {self.keys:,} x {self.head_dim}{causal}"
        )

    @property
    def scores(self) -> int:
        """Pairs of a query and a key that count. Under a causal mask query i meets keys 0 .. i."""
        met = self.queries * self.keys
        if self.causal:
            both = min(self.queries, self.keys)
            met = both * (both + 1) // 2 + max(self.queries - self.keys, 0) * self.keys
        return self.samples * self.heads * met

    @property
    def longest_row(self) -> int:
        """The most keys that one query meets."""
        return min(self.queries, self.keys) if self.causal else self.keys

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        queries = self.samples * self.heads * self.queries
        keys = self.samples * self.kv_heads * self.keys
        return queries * self.head_dim, keys * self.head_dim, keys * self.value_dim, queries * self.value_dim

    def forward(self) -> Cost:
        work = self.scores * (self.head_dim + 2 + self.value_dim)
        depth = log2_ceil(self.head_dim) + 3 * log2_ceil(self.longest_row)
        return Cost(work, depth, moved_bytes(*self._sizes))

    def input_gradient(self) -> Cost:
        """Products dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q; between them the softmax's sum and product."""
        work = self.scores * (2 * self.value_dim + 2 + 2 * self.head_dim)
        over_queries = log2_ceil(self.queries * (self.heads // self.kv_heads))
        row = log2_ceil(self.longest_row)
        depth = log2_ceil(self.value_dim) + row + max(row, over_queries)
        query, key, value, out = self._sizes
        return Cost(work, depth, moved_bytes(2 * query, 2 * key, 2 * value, 2 * out))
