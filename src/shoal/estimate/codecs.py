"""What compressing gradients costs, for plans: passes over the gradient, on any device.

Codecs are mostly element-wise kernels, one after the other, so their time is taken to be that of reading and writing
memory: counted in passes, it is carried over to another device by its memory bandwidth. The passes of a method
(`CompressTerm.passes`) were measured: seconds an element times the rate of a copy
(`calibration/codecs.measure_passes`) on one core of a Xeon that copies 25 GB/s. The bytes that the kernels read and
write, counted, give 0.65 to 1.03 of it. That it carries over to a GPU is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.strategy.terms.compress import CompressTerm, compressors

PASS_BYTES = 4
"""A pass reads or writes each element once, in 32 bits."""


def codec_s(term: CompressTerm, elements: Any, *, ranks: Any, stream_bytes_per_s: Any) -> Any:
    """Seconds that compressing `elements` takes among `ranks` ranks; columns of numbers will do."""
    if term.passes is None:
        known = ", ".join(method.__name__ for method in compressors() if method.passes is not None)
        raise ValueError(f"no passes are known for {term}; known are those of {known}")
    own, each = term.passes
    return (own + each * ranks) * PASS_BYTES * elements / stream_bytes_per_s


def named(table: Mapping[str, tuple[float, float]], term: CompressTerm) -> tuple[float, float] | None:
    """The row of a term, or of the same method with other numbers: those change its time by little."""
    if str(term) in table:
        return table[str(term)]
    return next((row for name, row in table.items() if name.partition("(")[0] == type(term).__name__), None)
