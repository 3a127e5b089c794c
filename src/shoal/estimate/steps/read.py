"""The `Machine` in the calibration file of this host, and the `Cluster` that it is to the planner."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cluster import Cluster, Device
from shoal.cluster.cluster import Level
from shoal.cluster.presets import THIS
from shoal.comm.calibration import WrongCalibration, calibration_path, read_calibration
from shoal.estimate.steps.machine import Curve, Machine, Product


def machine_here(path: Path | None = None) -> Machine | None:
    """What was measured on this host; None if nothing was, or only its links. Raises WrongCalibration."""
    path = path or calibration_path()
    if path is None or read_calibration(path) is None:
        return None
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("machine")
    if tables is None:
        return None
    try:
        return _machine(tables)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WrongCalibration(
            f"the calibration file {path} has a [machine] that cannot be read ({type(error).__name__}: {error}); "
            "delete it, or measure anew with `shoal calibrate`"
        ) from error


def cluster_here() -> Cluster | None:
    """This host as a cluster: a device is one rank's share of it. None if it was not calibrated."""
    machine, links = machine_here(), read_calibration()
    if machine is None or links is None:
        return None
    rate = machine.products["linear"][0].flops
    device = Device(
        name="this machine", peak_flops={"fp32": rate}, matmul_flops={"fp32": rate},
        memory_bytes=machine.memory_bytes / machine.ranks, memory_bytes_per_s=machine.memory_bytes_per_s, sms=1,
        origin="shoal calibrate",
    )  # fmt: skip
    link = links.network.inside
    level = Level(ranks=machine.ranks, bytes_per_s=1 / link.byte_s, latency_s=link.latency_s)
    return Cluster(name=THIS, device=device, levels=(level,), devices=machine.ranks)


def _machine(tables: Mapping[str, Any]) -> Machine:
    return Machine(
        ranks=int(tables["ranks"]),
        memory_bytes=_positive(tables["memory_bytes"]),
        memory_bytes_per_s=_positive(tables["memory_bytes_per_s"]),
        products={
            kind: (_product(both["forward"]), _product(both["backward"])) for kind, both in tables["products"].items()
        },
        passes={
            kind: (_curve(row["elements"], row["forward_s"]), _curve(row["elements"], row["backward_s"]))
            for kind, row in tables["passes"].items()
        },
        updates={name: _curve(row["parameters"], row["seconds"]) for name, row in tables["updates"].items()},
        collectives={kind: _curve(row["bytes"], row["seconds"]) for kind, row in tables["collectives"].items()},
        background_byte_s=_positive(tables["background_byte_s"]),
        overheads={name: max(0.0, float(each)) for name, each in tables.get("overheads", {}).items()},
        codecs={
            name: (float(row["tensor_s"]), float(row["element_s"])) for name, row in tables.get("codecs", {}).items()
        },
    )


def _product(row: Mapping[str, Any]) -> Product:
    return Product(**{name: _positive(row[name]) for name in ("start_s", "flops", "rows", "columns", "inner")})


def _curve(sizes: list[Any], seconds: list[Any]) -> Curve:
    if not sizes or len(sizes) != len(seconds) or sorted(sizes) != sizes:
        raise ValueError(f"{len(seconds)} times for the sizes {sizes}; expected one for each, smallest first")
    return Curve(tuple(_positive(each) for each in sizes), tuple(_positive(each) for each in seconds))


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{value!r}; expected a number above 0")
    return number
