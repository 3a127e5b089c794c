"""Values of a cluster file that are possible but hardly meant, each in a sentence. A plan made from them says so."""

from __future__ import annotations

from shoal.cluster.cluster import Device, Level

SOLD_IN_GIGABITS = (10, 25, 40, 50, 56, 100, 200, 400, 800)
"""Rates by which networks are named, in gigabits a second: the same number of gigabytes is hardly meant."""


def doubts_of_links(where: str, gb_per_s: float | None, levels: list[Level]) -> list[str]:
    """What is hardly meant of the last of these levels; `gb_per_s` if its bandwidth was given as a bare number."""
    found, level = [], levels[-1]
    if gb_per_s in SOLD_IN_GIGABITS and len(levels) > 1:
        found.append(
            f"gb_per_s of {where} is {gb_per_s:g} gigabytes a second, {8 * gb_per_s:g} Gb/s; "
            f'for a network of {gb_per_s:g} Gb/s write bandwidth = "{gb_per_s:g} Gb/s"'
        )
    rate_gb_s = level.bytes_per_s / 1e9
    if not 1e-3 <= rate_gb_s <= 2000:
        found.append(f"the bandwidth of {where} is {rate_gb_s:g} GB/s; links known today have 0.001 to 2000")
    if len(levels) > 1 and level.bytes_per_s > 2 * levels[-2].bytes_per_s:
        found.append(f"{where} is faster than the level inside it; levels stand innermost first")
    if level.latency_s > 1:
        found.append(f"the latency of {where} is {level.latency_s:g} s; messages known today take microseconds")
    return found


def doubts_of_device(device: Device) -> list[str]:
    """What is hardly meant of a device."""
    memory_gb, rate_gb_s = device.memory_bytes / 1e9, device.memory_bytes_per_s / 1e9
    peak_tflops = max(device.peak_flops.values()) / 1e12
    found = []
    if not 0.5 <= memory_gb <= 4000:
        found.append(f"device {device.name!r} has {memory_gb:g} GB of memory; devices known today have 1 to 2000")
    if not 1 <= rate_gb_s <= 30000:
        found.append(f"the memory of device {device.name!r} moves {rate_gb_s:g} GB/s; known today are 10 to 20000")
    if not 0.01 <= peak_tflops <= 1e5:
        found.append(f"device {device.name!r} computes {peak_tflops:g} TFLOP/s; known today are 0.05 to 20000")
    return found
