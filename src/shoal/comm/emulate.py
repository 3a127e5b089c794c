"""Parses the description of an emulated cluster: `"4x2, 10us, 20GB/s | 100us, 1Gb/s"`.

Four hosts of two ranks; links inside a host have a latency of 10 microseconds and 20 gigabytes per second, links
between hosts 100 microseconds and one gigabit per second. Ranks are assigned to hosts in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SHAPE = re.compile(r"\s*(\d+)\s*x\s*(\d+)\s*")
_LEVEL = re.compile(r"\s*([\d.]+)\s*(ns|us|µs|ms|s)\s*,\s*([\d.]+)\s*([kMGT]?)(B|b|bit)/s\s*")
EXAMPLE = "4x2, 10us, 20GB/s | 100us, 1Gb/s"


class WrongEmulation(ValueError):
    """A description of a cluster that cannot be read, or does not fit the job."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One level of links."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Emulation:
    """Hosts with the same number of ranks, and the links inside and between them."""

    hosts: int
    per_host: int
    inside: Speed
    between: Speed

    @property
    def world(self) -> int:
        return self.hosts * self.per_host

    def host_of(self, rank: int) -> int:
        return rank // self.per_host

    def speed(self, one: int, other: int) -> Speed:
        return self.inside if self.host_of(one) == self.host_of(other) else self.between


def parse_emulation(text: str) -> Emulation:
    """Reads a description; the second level may be omitted if there is one host or all links are equal."""
    head, comma, rest = text.partition(",")
    shape = _SHAPE.fullmatch(head)
    levels = [_LEVEL.fullmatch(part) for part in rest.split("|")]
    if not comma or shape is None or not all(levels) or len(levels) > 2:
        raise WrongEmulation(
            f"--emulate {text!r} cannot be read: expected hosts x ranks, then a latency and a bandwidth for the links "
            f'inside a host and, after |, between hosts, as in "{EXAMPLE}"'
        )
    hosts, per_host = int(shape[1]), int(shape[2])
    speeds = [_speed(level, text) for level in levels if level is not None]
    if hosts < 1 or per_host < 1:
        raise WrongEmulation(f"--emulate {text!r}: expected at least one host of one rank")
    return Emulation(hosts, per_host, speeds[0], speeds[-1])


def _speed(level: re.Match[str], text: str) -> Speed:
    try:
        latency_s = float(level[1]) * _TIMES[level[2]]
        bytes_per_s = float(level[3]) * _SIZES[level[4]] / (1 if level[5] == "B" else 8)
    except ValueError:
        raise WrongEmulation(f"--emulate {text!r}: {level[0].strip()!r} contains an invalid number") from None
    if bytes_per_s <= 0:
        raise WrongEmulation(f"--emulate {text!r}: the bandwidth is {level[3]}; expected more than 0")
    return Speed(latency_s, bytes_per_s)
