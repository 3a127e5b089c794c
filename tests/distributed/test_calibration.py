"""One calibration for all ranks of a job, whatever files they have; and the measurement on real ranks and hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks._hosts import torchrun, two_hosts, why_not

from cli.command import Place
from shoal.comm.calibration import read_calibration
from shoal.comm.network import DEFAULT

Ranks = Callable[..., list[Any]]
TARGET = "distributed.calibration_targets:by_own_file"

FILE = """
[links.inside]
latency_s = {latency_s}
byte_s = 1e-10
reduce_byte_s = 0.0
[links.between]
latency_s = 1e-4
byte_s = 1e-9
reduce_byte_s = 0.0
[backend]
fastest = "{backend}"
"""
# By the first a butterfly is the cheapest at every size here, by the second it never is.
DEAR, CHEAP = 1.0, 1e-12


def files(folder: Path, *each: str | None) -> dict[str, Any]:
    """For each rank the variable that names a file of its own, with this text; None: there is no such file."""
    for number, text in enumerate(each):
        if text is not None:
            (folder / f"{number}.toml").write_text(text)
    return {"each": [{"SHOAL_CALIBRATION": str(folder / f"{number}.toml")} for number in range(len(each))]}


@pytest.mark.parametrize("first", [DEAR, CHEAP, None])
def test_ranks_with_different_files_choose_alike_by_the_first_ones(
    ranks: Ranks, tmp_path: Path, first: float | None
) -> None:
    texts = [FILE.format(latency_s=latency_s, backend="shoal") for latency_s in (DEAR, CHEAP)]
    mine = None if first is None else FILE.format(latency_s=first, backend="shoal")
    found = ranks(TARGET, files(tmp_path, mine, *texts), ranks=3)
    expected = read_calibration(tmp_path / "0.toml")
    network = asdict(expected.network if expected is not None else DEFAULT)
    assert [each["network"] for each in found] == [network] * 3
    assert found[0]["sums"] == [3.0] * 3
    assert found[1]["sums"] == found[2]["sums"] == [6.0] * 3
    assert found[1]["algorithms"] == found[2]["algorithms"]
    # The pair's group without rank 0 too, though both of its members have other files.
    if first is not None:
        assert set(found[1]["algorithms"][::2]) == ({"butterfly"} if first == DEAR else {"rabenseifner"})
    assert all(each["after"] for each in found)


def test_the_fastest_backend_is_the_first_ones_too(ranks: Ranks, tmp_path: Path) -> None:
    texts = [FILE.format(latency_s=1e-5, backend=backend) for backend in ("gloo", "shoal")]
    arguments = files(tmp_path, *texts)
    assert [each["backend"] for each in ranks(TARGET, arguments, ranks=2)] == ["shoal-gloo"] * 2
    arguments["each"][0]["SHOAL_BACKEND"] = "shoal"
    assert [each["backend"] for each in ranks(TARGET, arguments, ranks=2)] == ["shoal"] * 2


def test_links_are_emulated_by_the_shoal_backend_whatever_is_fastest(ranks: Ranks, tmp_path: Path) -> None:
    arguments = files(tmp_path, FILE.format(latency_s=1e-5, backend="gloo"), None)
    found = ranks(TARGET, {**arguments, "emulate": "2x1, 10us, 1GB/s"}, ranks=2)
    assert [each["backend"] for each in found] == ["shoal"] * 2


def test_a_broken_file_of_rank_0_is_told_to_all_and_one_of_another_rank_does_not_matter(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole, broken = FILE.format(latency_s=1e-5, backend="shoal"), FILE.format(latency_s=-1, backend="shoal")
    found = ranks(TARGET, files(tmp_path, broken, whole), ranks=2)
    assert [each["joined"] for each in found] == [False, False]
    assert found[0]["error"] == found[1]["error"]
    assert f"{tmp_path / '0.toml'}: latency_s of [links.inside] is -1" in found[0]["error"]
    assert [each["sums"] for each in ranks(TARGET, files(tmp_path, whole, broken), ranks=2)] == [[4.0] * 3] * 2


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(180)
def test_under_torchrun_the_links_between_hosts_are_measured(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    place = Place(folder=tmp_path)
    words = ["shoal", "calibrate", "--quick", "--force", "--json", "--output", str(tmp_path / "file.toml")]
    with two_hosts() as hosts:
        first, second = torchrun(hosts, words, ranks_a_host=2, environment=place.environment(), timeout_s=150)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    found = json.loads(first.stdout)
    assert (found["ranks"], found["hosts"], found["link_ranks"]) == (4, 2, {"inside": 2, "between": 2})
    assert second.stdout == ""
    assert read_calibration(tmp_path / "file.toml") is not None
    assert "loopback" not in (tmp_path / "file.toml").read_text()
    place.require_clean()
