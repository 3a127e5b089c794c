"""`Cluster`: where a job trains. A device, and the links that join devices, level by level.

Frozen and plain, so that presets, files of users and calibrated machines are the same to a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
"""Formats in which a device multiplies matrices."""


class BadCluster(ValueError):
    """A cluster that cannot exist, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator (or one host's processors)."""

    name: str
    peak_flops: Mapping[str, float]
    """Operations a second by precision, dense, as the datasheet says."""
    memory_bytes: float
    memory_bytes_per_s: float
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    """The fastest matrix product that was measured, by precision, where it was measured."""
    sms: int = 128
    """Processors that share a matrix product: a product of fewer tiles leaves some idle."""
    domain: int = 0
    """Devices joined by one switched fabric whatever a "node" is called; 0: the node (72 in a GB200 NVL72 rack)."""
    watts: float | None = None
    """Power of the board under full load; None where unknown."""
    origin: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        _positive(f"device {self.name!r}", memory_bytes=self.memory_bytes, memory_bytes_per_s=self.memory_bytes_per_s)
        _positive(f"device {self.name!r}", sms=self.sms, **({} if self.watts is None else {"watts": self.watts}))
        for table, rates in (("peak_flops", self.peak_flops), ("matmul_flops", self.matmul_flops)):
            for precision, rate in rates.items():
                if precision not in PRECISIONS:
                    raise BadCluster(
                        f"{table} of device {self.name!r} names {precision!r}; expected {_listed(PRECISIONS)}"
                    )
                _positive(f"device {self.name!r}", **{f"{table}.{precision}": rate})
        if not self.peak_flops:
            raise BadCluster(
                f"device {self.name!r} has no peak_flops; give one for at least one of {_listed(PRECISIONS)}"
            )

    def peak(self, precision: str) -> float:
        """Peak in a precision; one that the device lacks runs in the nearest wider format that it has."""
        wider = {
            "fp8": ("fp8", "bf16", "fp16"),
            "bf16": ("bf16", "fp16"),
            "fp16": ("fp16", "bf16"),
            "tf32": ("tf32",),
            "fp32": ("fp32",),
        }[precision]
        for format_ in (*wider, "tf32", "fp32"):
            if format_ in self.peak_flops:
                return self.peak_flops[format_]
        return max(self.peak_flops.values())

    def matmul(self, precision: str) -> float | None:
        """The measured rate in a precision, or one scaled from bf16/fp16 by the peaks; None if nothing was measured."""
        if precision in self.matmul_flops:
            return self.matmul_flops[precision]
        for known in ("bf16", "fp16", "fp32"):
            if known in self.matmul_flops:
                return self.matmul_flops[known] * self.peak(precision) / self.peak(known)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Links that join `ranks` units of the level below (devices, for the innermost)."""

    ranks: int
    bytes_per_s: float
    """Per device and direction: a node's network cards divided by its devices."""
    latency_s: float

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise BadCluster(f"a level joins {self.ranks} ranks; expected at least 1")
        _positive("a level", bytes_per_s=self.bytes_per_s)
        if not 0 <= self.latency_s < float("inf"):
            raise BadCluster(f"latency_s of a level is {self.latency_s}; expected seconds, at least 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Devices of one kind, joined level by level, innermost first."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    devices: int
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Values of a user's file that are hardly meant, each in a sentence."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise BadCluster(f"cluster {self.name!r} has {self.devices} devices; expected at least 1")
        joined = prod(level.ranks for level in self.levels)
        if joined != self.devices:
            product = " x ".join(str(level.ranks) for level in self.levels) or "no levels"
            raise BadCluster(
                f"cluster {self.name!r} has {self.devices} devices, but its levels join {product} = {joined}; "
                "make the product equal to the number of devices"
            )

    @property
    def node(self) -> int:
        """Devices joined by the innermost level."""
        return self.levels[0].ranks if self.levels else 1

    def resized(self, devices: int) -> Cluster:
        """The same nodes, as many of them as `devices` fill; fewer devices than a node are a part of one."""
        if devices < 1:
            raise BadCluster(f"a cluster of {devices} devices was asked for; expected at least 1")
        levels, left = [], devices
        for level in self.levels[:-1]:
            ranks = min(level.ranks, left)
            if left % ranks:
                raise BadCluster(
                    f"{devices} devices do not fill complete units of {level.ranks}; "
                    f"the nearest that do are {max(1, left // ranks) * (devices // left) * ranks} and "
                    f"{(left // ranks + 1) * (devices // left) * ranks}"
                )
            levels.append(Level(ranks=ranks, bytes_per_s=level.bytes_per_s, latency_s=level.latency_s))
            left //= ranks
        last = self.levels[-1] if self.levels else Level(ranks=1, bytes_per_s=1e9, latency_s=0.0)
        levels.append(Level(ranks=left, bytes_per_s=last.bytes_per_s, latency_s=last.latency_s))
        return replace(self, levels=tuple(levels), devices=devices)


def _positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise BadCluster(f"{name} of {what} is {value}; expected a finite number above 0")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
