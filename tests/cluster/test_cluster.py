"""Clusters: presets agree with themselves, files are read, and impossible ones are refused in a sentence."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from shoal.cluster import DEVICES, PRESETS, BadCluster, cluster, device, read_cluster
from shoal.cluster.presets import ALIASES

GOOD = """
name = "ours"
devices = 32
device = "A100 SXM4 80GB"

[[level]]
ranks = 8
gb_per_s = 300
latency_us = 7

[[level]]
ranks = 4
gb_per_s = 25
latency_us = 40
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES])
def test_every_preset_is_a_cluster_whose_levels_join_its_devices(name: str) -> None:
    found = cluster(name)
    assert prod(level.ranks for level in found.levels) == found.devices


def test_a_preset_has_as_many_devices_as_asked_for() -> None:
    small = cluster("dgx-a100", devices=4)
    assert [level.ranks for level in small.levels] == [4, 1]
    assert cluster("dgx-a100", devices=1024).devices == 1024


def test_devices_that_do_not_fill_nodes_are_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(BadCluster, match=r"12 devices do not fill .* 8 and 16"):
        cluster("dgx-a100", devices=12)


def test_every_device_names_the_origin_of_its_figures_and_measures_below_its_peak() -> None:
    for each in DEVICES:
        assert each.origin
        for precision, rate in each.matmul_flops.items():
            assert rate < each.peak(precision)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a100 sxm4 80gb", "A100 SXM4 80GB"),
        ("NVIDIA H100", "H100 SXM5 80GB"),
        ("H800", "H100 SXM5 80GB"),
        ("V100 32GB", "V100 SXM2 32GB"),
        ("GB200", "GB200 (per GPU)"),
        ("B200", "B200 SXM"),
        ("MI250X", "MI250X (whole OAM = 2 GCDs)"),
        ("A100 40GB", "A100 SXM4 40GB"),
    ],
)
def test_devices_are_found_by_the_names_people_write(given: str, found: str) -> None:
    assert device(given).name == found


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(BadCluster, match="no device is called 'abacus'"):
        device("abacus")


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read_cluster(written(tmp_path, GOOD))
    assert (found.name, found.devices, found.node) == ("ours", 32, 8)
    assert found.levels[1].bytes_per_s == 25e9
    assert found.levels[1].latency_s == pytest.approx(40e-6)


def test_a_file_may_describe_its_own_device(tmp_path: Path) -> None:
    text = GOOD.replace('device = "A100 SXM4 80GB"', "") + (
        "[device]\npeak_tflops = {bf16 = 100}\nmatmul_tflops = {bf16 = 80}\nmemory_gb = 24\nmemory_gb_s = 900\n"
    )
    found = read_cluster(written(tmp_path, text)).device
    assert found.peak("bf16") == 100e12
    assert found.matmul("bf16") == 80e12


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("devices = 32", "devices = 30", r"30 devices, but its levels join 8 x 4 = 32"),
        ("gb_per_s = 25", "gb_per_s = 0", r"gb_per_s of level 2 is 0; expected a finite number above 0"),
        ("gb_per_s = 300", "gb_per_s = -3", r"gb_per_s of level 1 is -3"),
        ("latency_us = 7", "latency_us = -1", r"latency_us of level 1 is -1"),
        (
            "latency_us = 7",
            "latency_ms = 7",
            r"level 1 has an unknown key 'latency_ms' \(did you mean 'latency_us'\?\)",
        ),
        ("ranks = 8", "ranks = 2.5", r"ranks of level 1 is 2.5; expected a whole number"),
        ('device = "A100 SXM4 80GB"', 'device = "abacus"', r"no device is called 'abacus'"),
        ("[[level]]", "[[lever]]", r"unknown key 'lever' \(did you mean 'level'\?\)"),
        ("devices = 32", "devices = ", r"is not TOML"),
    ],
)
def test_an_impossible_file_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(BadCluster, match=told) as refusal:
        read_cluster(written(tmp_path, GOOD.replace(old, new)))
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCluster, match="No such file"):
        read_cluster(tmp_path / "none.toml")


def test_a_misspelt_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadCluster, match=r"did you mean 'dgx-a100'"):
        cluster("dgx-a10")
