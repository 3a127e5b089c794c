"""What messages cost between the ranks of a job: a latency and a time for each byte, inside a host and between hosts.

Every rank of a job chooses its algorithms by these numbers, so they must be the same on all ranks: ranks agree on
one NetworkTimes when they join; without a job DEFAULT is used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """One kind of link: the cost of a message, and of each byte of it."""

    latency_s: float
    byte_s: float
    reduce_byte_s: float = 0.0
    """Additional cost of reducing a byte that was received."""


@dataclass(frozen=True, slots=True)
class NetworkTimes:
    """The links of a job: inside a host and between hosts."""

    inside: LinkTimes
    between: LinkTimes

    def slowest(self, hosts: int) -> LinkTimes:
        return self.inside if hosts == 1 else self.between


DEFAULT = NetworkTimes(
    inside=LinkTimes(latency_s=30e-6, byte_s=1 / 6e9, reduce_byte_s=1 / 12e9),
    between=LinkTimes(latency_s=100e-6, byte_s=1 / 1e9, reduce_byte_s=1 / 12e9),
)
"""Defaults before `shoal calibrate`: two processes of one machine over shared memory; a 10 Gb/s network."""

_agreed: NetworkTimes | None = None


def agreed() -> NetworkTimes | None:
    """What the ranks of this process's job have agreed on; None outside a job."""
    return _agreed


def agree_on(network: NetworkTimes | None) -> None:
    global _agreed
    _agreed = network
