"""What compressing gradients costs, for plans: passes over the gradient, on any device.

The codecs of `comm/compress` are mostly element-wise kernels, one after the other, so their time is taken to be that of
reading and writing memory: counted in passes, it is carried over to another device by its memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.strategy.terms.compress import CompressTerm

PASS_BYTES = 4
"""A pass reads or writes each element once, in 32 bits."""

CODEC_PASSES: Mapping[str, tuple[float, float]] = {
    "fp16()": (33, 0), "int8()": (31, 3.8), "qsgd(4)": (78, 24), "ternary()": (41, 13), "onebit()": (39, 9.8),
    "sign()": (33, 8.6), "topk(0.01)": (31, 0.4), "randomk(0.05)": (39, 0), "dgc(0.01)": (42, 0.2),
    "mstopk(0.01)": (39, 0.3), "gtopk(0.01)": (35, 3.9), "sketch(3, 4000)": (206, 0), "powersgd(4)": (26, 0),
    "powersgd(16)": (26, 0),
}  # fmt: skip
"""Passes for a rank's own part, and for the payload of each rank that is added. Measured: seconds an element times the
rate of a copy (`calibration/codecs.measure_passes`) on one core of a Xeon that copies 25 GB/s. The bytes that the
kernels read and write, counted, give 0.65 to 1.03 of it. That it carries over to a GPU is assumed."""


def codec_s(term: CompressTerm, elements: Any, *, ranks: Any, stream_bytes_per_s: Any) -> Any:
    """Seconds that compressing so many elements takes among `ranks` ranks; columns of numbers will do."""
    found = named(CODEC_PASSES, term)
    if found is None:
        raise ValueError(f"no passes are known for {term}; measured are {', '.join(CODEC_PASSES)}")
    own, each = found
    return (own + each * ranks) * PASS_BYTES * elements / stream_bytes_per_s


def named(table: Mapping[str, tuple[float, float]], term: CompressTerm) -> tuple[float, float] | None:
    """The row of a term, or of the same method with other numbers: those change its time by little."""
    if str(term) in table:
        return table[str(term)]
    return next((row for name, row in table.items() if name.partition("(")[0] == type(term).__name__), None)
