"""Quantities of cluster files carry their units, and values that are hardly meant are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cluster.cluster import BadCluster
from shoal.cluster.read import read_cluster
from shoal.files.quantities import BadQuantity, duration, rate, size

FILE = """
device = "A100 SXM4 80GB"
[[level]]
ranks = 8
bandwidth = "300 GB/s"
latency = "7 us"
[[level]]
ranks = 4
{outer}
"""


def cluster_with(tmp_path: Path, outer: str) -> object:
    file = tmp_path / "ours.toml"
    file.write_text(FILE.format(outer=outer))
    return read_cluster(file)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (rate, "10 Gb/s", 1.25e9),
        (rate, "10 GB/s", 1e10),
        (rate, "100Gbps", 1.25e10),
        (rate, "1.5 Tbit/s", 1.875e11),
        (size, "64 GB", 64e9),
        (size, "80 GiB", 80 * 2**30),
        (duration, "7 us", 7e-6),
        (duration, "0.2 ms", 2e-4),
    ],
)
def test_units_are_read(read: object, text: str, value: float) -> None:
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["10", 10, "GB/s", "10 furlongs", "1..2 GB/s", "1e999 GB/s", "10 Gb", ""])
def test_a_rate_without_a_proper_unit_is_refused(text: object) -> None:
    with pytest.raises(BadQuantity):
        rate(text)


def test_ten_gigabit_ethernet_is_ten_gigabits(tmp_path: Path) -> None:
    found = cluster_with(tmp_path, 'bandwidth = "10 Gb/s"')
    assert found.levels[1].bytes_per_s == 1.25e9
    assert found.warnings == ()


def test_a_bare_number_that_names_a_network_in_gigabits_is_doubted(tmp_path: Path) -> None:
    found = cluster_with(tmp_path, "gb_per_s = 10")
    assert found.warnings == (
        'gb_per_s of level 2 is 10 gigabytes a second, 80 Gb/s; for a network of 10 Gb/s write bandwidth = "10 Gb/s"',
    )
    assert found.resized(16).warnings == found.warnings


@pytest.mark.parametrize(
    ("outer", "said"),
    [
        ("bandwidth = 10", r"bandwidth of level 2: 10 has no unit"),
        ('bandwidth = "10 Gb/s"\ngb_per_s = 3', "level 2 has both bandwidth and gb_per_s; give one of them"),
        ('latency = "7 us"', r"level 2 has no bandwidth; give one with its unit, such as \"200 Gb/s\""),
        ('bandwidth = "10 Gb/s"\nlatency = "7"', "latency of level 2: '7' has no unit"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, outer: str, said: str) -> None:
    with pytest.raises(BadCluster, match=said):
        cluster_with(tmp_path, outer)


@pytest.mark.parametrize("read", [rate, size, duration])
def test_a_negative_quantity_is_called_negative(read: Callable[[object], float]) -> None:
    with pytest.raises(BadQuantity, match="is negative; expected"):
        read("-10 Gb/s")


def test_both_letters_for_micro_are_read() -> None:
    assert duration("7 \u00b5s") == duration("7 \u03bcs") == 7e-6
