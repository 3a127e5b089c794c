"""`Inputs`: all that an estimate depends on, as columns of numbers, one row a question.

A column has one value for each row, or a single one for all. Rows come from a file of measurements or from one model,
one cluster and many candidate strategies; the formulas do not know which, and never loop over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.cluster import Cluster, Device
from shoal.shapes.shape import Transformer

Column = NDArray[Any]

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream")
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp8-rowwise")
"""fp8 with one scale a tensor, or (slower) one a row; only linear layers run in it."""
ORDER = ("tp", "cp", "ep", "dp", "pp")
"""Placement, innermost first. `ep` divides `dp`: both places belong to the replicas of the dense part."""
UNKNOWN = -1
"""An overlap that was not stated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Columns. Counts are floats, so that sums and quotients stay in one type."""

    # The model.
    layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    ffn: Column
    gated: Column
    vocab: Column
    tied: Column
    experts: Column
    active_experts: Column
    sequence_length: Column
    causal: Column
    # The device, in the precision of the row.
    peak_flops: Column
    matmul_flops: Column
    """Measured where known, else a fraction of the peak; of the 16-bit format where linear layers run in fp8."""
    memory_bytes: Column
    memory_bytes_per_s: Column
    sms: Column
    # The links: levels x rows. A unit of level i joins `level_ranks[i]` devices in all.
    level_ranks: Column
    level_bytes_per_s: Column
    level_latency_s: Column
    # The strategy. The stride of an axis is the distance in ranks between neighbours along it.
    dp: Column
    tp: Column
    pp: Column
    cp: Column
    ep: Column
    tp_stride: Column
    cp_stride: Column
    ep_stride: Column
    dp_stride: Column
    pp_stride: Column
    chunks: Column
    schedule: Column
    zero: Column
    ulysses: Column
    """Whether cp exchanges parts of the sequence for heads; else keys and values go round a ring."""
    sequence: Column
    """Whether tp also cuts the sequence between its layers."""
    micro_batch: Column
    global_batch: Column
    recompute: Column
    precision: Column
    overlap: Column
    """1 if data-parallel messages are known to overlap, 0 if known not to, -1 if unknown."""

    def __len__(self) -> int:
        return max(np.asarray(getattr(self, field.name)).shape[-1] for field in fields(self))

    @property
    def devices(self) -> Column:
        """Ranks in all: dp counts every replica of the dense part, experts included."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> Column:
        """Passes of a replica in one step."""
        return np.maximum(1.0, self.global_batch / (self.dp * self.micro_batch))

    @property
    def wide(self) -> Column:
        """Whether activations take four bytes."""
        return (self.precision == PRECISIONS.index("fp32")) | (self.precision == PRECISIONS.index("tf32"))

    @property
    def fp8(self) -> Column:
        """Whether linear layers run in fp8 with one scale a tensor."""
        return self.precision == PRECISIONS.index("fp8")

    def rows(self, chosen: Any) -> Inputs:
        """Some of the rows."""
        size = len(self)
        columns = {}
        for field in fields(self):
            column = np.asarray(getattr(self, field.name))
            columns[field.name] = column[..., chosen] if column.shape[-1] == size and size > 1 else column
        return Inputs(**columns)


def strides(sizes: Mapping[str, ArrayLike], order: Sequence[str] = ORDER) -> dict[str, Column]:
    """The stride of each axis of a placement, innermost first. Without "ep" in the order it lies innermost in dp."""
    ep = np.asarray(sizes.get("ep", 1.0), dtype=float)
    names = list(order)
    if "ep" not in names:
        names.insert(names.index("dp"), "ep")
    if sorted(names) != sorted(ORDER):
        raise ValueError(f"a placement orders the axes {', '.join(ORDER)}, each once; it was given {', '.join(order)}")
    inside = np.asarray(1.0)
    found = {}
    for axis in names:
        found[axis] = inside
        size = np.asarray(sizes.get(axis, 1.0), dtype=float)
        inside = inside * (size / ep if axis == "dp" else size)
    return found


def inputs_for(
    shape: Transformer,
    cluster: Cluster,
    global_batch: ArrayLike,
    *,
    dp: ArrayLike = 1,
    tp: ArrayLike = 1,
    pp: ArrayLike = 1,
    cp: ArrayLike = 1,
    ep: ArrayLike = 1,
    zero: ArrayLike = 0,
    ulysses: ArrayLike = False,
    sequence: ArrayLike = False,
    micro_batch: ArrayLike = 1,
    chunks: ArrayLike = 1,
    schedule: str | Sequence[str] | ArrayLike = "1f1b",
    recompute: str | Sequence[str] | ArrayLike = "none",
    precision: str | Sequence[str] | ArrayLike = "bf16",
    overlap: ArrayLike = UNKNOWN,
    order: Sequence[str] = ORDER,
    placed: Mapping[str, ArrayLike] | None = None,
) -> Inputs:
    """One model on one cluster under many candidates: each argument is one value or one for each candidate.

    `dp` counts every replica of the dense part; `ep` divides it. `order` places the axes, innermost first, for all
    candidates; `placed` gives strides of its own to each. Words (schedule, recompute, precision) may be their indices.
    """
    number = {
        name: np.atleast_1d(np.asarray(value, dtype=float))
        for name, value in {
            "dp": dp,
            "tp": tp,
            "pp": pp,
            "cp": cp,
            "ep": ep,
            "zero": zero,
            "sequence": sequence,
            "ulysses": ulysses,
            "micro_batch": micro_batch,
            "chunks": chunks,
            "global_batch": global_batch,
            "overlap": overlap,
        }.items()
    }
    codes = {
        "schedule": _codes("schedule", schedule, SCHEDULES),
        "recompute": _codes("recompute", recompute, RECOMPUTE),
        "precision": _codes("precision", precision, PRECISIONS),
    }
    found = {
        **strides(number, order),
        **{axis: np.asarray(value, dtype=float) for axis, value in (placed or {}).items()},
    }
    cumulative = np.cumprod([level.ranks for level in cluster.levels]) if cluster.levels else np.ones(1)
    device_columns = [device_at(cluster.device, each) for each in PRECISIONS]
    peak, matmul = (np.array([each[i] for each in device_columns])[codes["precision"]] for i in (0, 1))
    return Inputs(
        **{
            name: np.atleast_1d(np.asarray(getattr(shape, name), dtype=float))
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "ffn",
                "gated",
                "vocab",
                "tied",
                "experts",
                "active_experts",
                "causal",
            )
        },
        sequence_length=np.array([float(shape.sequence)]),
        peak_flops=peak,
        matmul_flops=matmul,
        memory_bytes=np.array([cluster.device.memory_bytes]),
        memory_bytes_per_s=np.array([cluster.device.memory_bytes_per_s]),
        sms=np.array([float(cluster.device.sms)]),
        level_ranks=np.asarray(cumulative, dtype=float).reshape(-1, 1),
        level_bytes_per_s=np.array([level.bytes_per_s for level in cluster.levels] or [1e9]).reshape(-1, 1),
        level_latency_s=np.array([level.latency_s for level in cluster.levels] or [0.0]).reshape(-1, 1),
        **{f"{axis}_stride": np.atleast_1d(stride) for axis, stride in found.items()},
        **number,
        **codes,
    )


UNMEASURED = 0.82
"""Matrix products reach this part of the peak where unmeasured (mean of A100, H100, B200, GB200 in `devices.toml`).
"""


def device_at(device: Device, precision: str) -> tuple[float, float]:
    """(peak, rate of the best matrix product) in a precision; fp8 gives those of bf16, its gain is the formulas'
    affair.
    """
    format_ = "bf16" if precision.startswith("fp8") else precision
    peak = device.peak(format_)
    return peak, device.matmul(format_) or UNMEASURED * peak


def _codes(name: str, given: Any, known: Sequence[str]) -> Column:
    """Indices of words; indices themselves pass."""
    values = np.atleast_1d(np.asarray(given))
    if values.dtype.kind in "iu":
        return values
    words, where = np.unique(values.astype(str), return_inverse=True)
    for word in words:
        if word not in known:
            raise ValueError(f"{name} is {word!r}; expected one of {', '.join(known)}")
    return np.array([known.index(word) for word in words])[where]
