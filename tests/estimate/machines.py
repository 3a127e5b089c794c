"""A machine whose times are round: everything at one rate, nothing at the start."""

from __future__ import annotations

from pathlib import Path

from shoal.estimate.steps.machine import Curve, Machine, Product
from shoal.estimate.steps.read import table_of_machine
from shoal.files.schema import BackendTable, CalibrationFile, LinksTable, LinkTable
from shoal.files.toml import toml_text

KINDS = ("add", "relu", "gelu", "copy", "layer norm", "batch norm", "pooling", "loss", "embedding")


def line(seconds_each: float, *, start_s: float = 1e-12) -> Curve:
    sizes = tuple(float(1 << power) for power in range(4, 30, 2))
    return Curve(sizes, tuple(start_s + seconds_each * size for size in sizes))


def machine(
    *,
    byte_s: float = 1e-12,
    message_s: float = 1e-12,
    overhead_s: float = 0.0,
    element_s: float = 1e-10,
    flops: float = 1e11,
    ranks: int = 2,
) -> Machine:
    def product(factor: float) -> Product:
        return Product(start_s=1e-12, flops=flops / factor, rows=1e-9, columns=1e-9, inner=1e-9)

    kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")
    return Machine(
        ranks=ranks,
        memory_bytes=24e9,
        memory_bytes_per_s=1e12,
        products={kind: (product(1), product(2)) for kind in ("linear", "convolution", "attention")},
        passes={kind: (line(element_s), line(element_s)) for kind in KINDS},
        updates={"AdamW": line(1e-12), "SGD": line(1e-12)},
        collectives={kind: line(byte_s, start_s=message_s) for kind in kinds},
        background_byte_s=1e-9,
        overheads={"step_s": overhead_s, "pass_s": overhead_s, "action_s": overhead_s},
        codecs={"ternary()": (1e-3, 1e-9)},
    )


def calibration(of: Machine | None) -> CalibrationFile:
    inside = LinkTable(latency_s=1e-5, byte_s=2e-10, reduce_byte_s=0.0)
    between = LinkTable(latency_s=1e-4, byte_s=1e-9, reduce_byte_s=0.0)
    table = table_of_machine(of, {"linear": 0.04}) if of is not None else None
    return CalibrationFile(
        links=LinksTable(inside=inside, between=between), backend=BackendTable(fastest="shoal"), machine=table
    )


def write_calibration(path: Path, of: Machine | None) -> Path:
    path.write_text(toml_text(calibration(of)), encoding="utf-8")
    return path
