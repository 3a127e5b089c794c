"""From times to a calibration: constants are found again, the fastest is named, the file says what was found."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shoal.calibration.findings import CannotCalibrate, Findings, as_toml, findings_of, write_findings
from shoal.calibration.fit import CannotFit, Timed, fit_link
from shoal.calibration.measure import ALGORITHMS
from shoal.comm.calibration import read_calibration
from shoal.comm.choice import all_reduce_time
from shoal.comm.network import DEFAULT, LinkTimes, NetworkTimes

SIZES = [1 << power for power in range(10, 25, 2)]
LINKS = [LinkTimes(2e-5, 1.4e-10, 8e-11), LinkTimes(1e-3, 8e-8, 1e-11), LinkTimes(5e-6, 4e-11, 0.0)]


def times_of(link: LinkTimes, ranks: int) -> list[Timed]:
    network = NetworkTimes(link, link)
    return [Timed(name, n, all_reduce_time(name, n, ranks, ranks, network)) for name in ALGORITHMS for n in SIZES]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("link", LINKS)
def test_the_fit_finds_the_constants_that_made_the_times(link: LinkTimes, ranks: int) -> None:
    fit = fit_link(times_of(link, ranks), ranks=ranks)
    assert fit.error < 1e-6
    assert fit.link.latency_s == pytest.approx(link.latency_s, rel=1e-4)
    assert fit.link.byte_s == pytest.approx(link.byte_s, rel=1e-4)
    assert fit.link.reduce_byte_s == pytest.approx(link.reduce_byte_s, rel=1e-4, abs=1e-4 * link.byte_s)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_disturbed_times_do_not_move_the_constants(seed: int) -> None:
    draw = random.Random(seed)
    link = LINKS[0]
    times = [Timed(t.algorithm, t.nbytes, t.seconds * draw.uniform(0.95, 1.05)) for t in times_of(link, 4)]
    for number in draw.sample(range(len(times)), 5):
        times[number] = Timed(times[number].algorithm, times[number].nbytes, 10 * times[number].seconds)
    fit = fit_link(times, ranks=4)
    assert fit.link.latency_s == pytest.approx(link.latency_s, rel=0.1)
    assert fit.link.byte_s + fit.link.reduce_byte_s / 2 == pytest.approx(link.byte_s + link.reduce_byte_s / 2, rel=0.1)
    assert 0.005 < fit.error < 0.1


@pytest.mark.parametrize("factor", [0.7, 2.0])
def test_constants_stay_within_what_a_link_can_have(factor: float) -> None:
    """A butterfly that is off by this much would have reducing cost less than nothing, or all of the time."""
    plain = times_of(LinkTimes(2e-5, 1e-10, 0.0), 2)
    times = [Timed(t.algorithm, t.nbytes, t.seconds * (factor if t.algorithm == "butterfly" else 1)) for t in plain]
    link = fit_link(times, ranks=2).link
    assert link.reduce_byte_s == pytest.approx(0.0 if factor < 1 else link.byte_s)
    assert link.byte_s + link.reduce_byte_s / 2 == pytest.approx(1e-10, rel=0.5)


def test_times_that_are_none_are_refused() -> None:
    for nothing in (0.0, float("nan")):
        with pytest.raises(CannotFit, match="time above 0"):
            fit_link([Timed("ring", n, nothing) for n in SIZES], ranks=2)


def measured(**changed: Any) -> dict[str, Any]:
    """As ranks would say it: Gloo takes twice as long, and one round in four was disturbed."""
    rows = [
        {"where": "backends", "what": kind, "by": by, "bytes": n, "seconds": [s, s, s, 9 * s]}
        for kind in ("all_reduce", "all_gather")
        for n in SIZES
        for by, s in (("shoal", 1e-5 + n * 1e-10), ("gloo", 2e-5 + n * 2e-10))
    ]
    rows += [
        {"where": where, "what": "all_reduce", "by": t.algorithm, "bytes": t.nbytes, "seconds": [t.seconds] * 4}
        for where, link in (("inside", LINKS[0]), ("between", LINKS[1]))
        for t in times_of(link, 2)
    ]
    counts = {"ranks": 2, "hosts": 1, "links": {"inside": 2, "between": 2}}
    return {"rows": rows, "torch": "2.13.0", "disturbed": 0.01, **counts, **changed}


def test_what_was_found_comes_back_from_the_file(tmp_path: Path) -> None:
    findings = findings_of(measured())
    assert findings.relative_time == pytest.approx({"shoal": 1.0, "gloo": 2.0})
    assert findings.warnings == []
    assert findings.over_best == pytest.approx({"inside": 1.0, "between": 1.0})
    path = tmp_path / "new" / "folder" / "calibration.toml"
    write_findings(findings, path)
    found = read_calibration(path)
    assert found is not None
    assert found.backend == "shoal"
    for got, link in ((found.network.inside, LINKS[0]), (found.network.between, LINKS[1])):
        assert (got.latency_s, got.byte_s) == pytest.approx((link.latency_s, link.byte_s), rel=1e-3)
    assert [file.name for file in path.parent.iterdir()] == ["calibration.toml"]
    tables = tomllib.loads(path.read_text())
    assert tables["measured"]["rounds"] == 4
    assert tables["backend"]["relative_time"]["gloo"] == 2.0
    assert "loopback" in path.read_text()


def test_the_fastest_is_the_one_with_the_smaller_times_and_never_one_for_other_memory() -> None:
    swapped = measured()
    for row in swapped["rows"]:
        row["by"] = {"shoal": "gloo", "gloo": "shoal"}.get(row["by"], row["by"])
    on_gpu = [{**row, "by": "nccl", "seconds": [1e-9] * 4} for row in swapped["rows"] if row["by"] == "gloo"]
    swapped["rows"] += on_gpu
    findings = findings_of(swapped)
    assert findings.fastest == "gloo"
    assert set(findings.relative_time) == {"shoal", "gloo", "nccl"}


def test_links_inside_hosts_of_one_rank_are_the_default_and_said_not_to_be_measured(tmp_path: Path) -> None:
    far = measured(hosts=2, links={"between": 2})
    far["rows"] = [row for row in far["rows"] if row["where"] != "inside"]
    findings = findings_of(far)
    write_findings(findings, tmp_path / "file.toml")
    found = read_calibration(tmp_path / "file.toml")
    assert found is not None
    assert found.network.inside.latency_s == DEFAULT.inside.latency_s
    text = as_toml(findings)
    assert re.search(r"# Not measured .*\n\[links.inside\]", text)
    assert "loopback" not in text


def test_a_busy_machine_and_too_many_ranks_are_warned_of() -> None:
    assert "other programs had the cores 40% of the time" in findings_of(measured(disturbed=0.4)).warnings[0]
    assert findings_of(measured(disturbed=0.3)).usable
    assert not findings_of(measured(disturbed=0.5)).usable
    assert "1000 ranks shared" in findings_of(measured(ranks=1000)).warnings[0]


def test_times_that_no_link_could_have_are_not_usable() -> None:
    wrong = measured()
    for row in wrong["rows"]:
        row["seconds"] = [1.0 / row["bytes"]] * 4
    findings = findings_of(wrong)
    assert not findings.usable

    assert "links inside hosts: the model is " in findings.warnings[0]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotCalibrate, match=r"cannot be written: .*; name another file by --output"):
        write_findings(findings_of(measured()), tmp_path / "file" / "calibration.toml")


def test_choices_are_those_of_the_model() -> None:
    findings: Findings = findings_of(measured())
    (first, small), (later, large) = findings.choices("inside")
    assert (first, small, large) == (1024, "butterfly", "rabenseifner")
    link = findings.network.inside
    assert later / 2 <= link.latency_s / (link.byte_s / 2 + link.reduce_byte_s / 2) <= later


def test_what_a_wrong_choice_costs_is_said() -> None:
    slower = measured()
    for row in slower["rows"]:
        if row["where"] == "inside" and row["by"] in ("butterfly", "rabenseifner", "ring"):
            row["seconds"] = [3 * each for each in row["seconds"]]
    assert findings_of(slower).over_best["inside"] > 1.1
