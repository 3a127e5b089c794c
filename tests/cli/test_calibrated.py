"""What a calibration is good for: plans of any job on this machine, and profiles learned from measured steps."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from cli.conftest import Shoal
from cli.jobs import write_job
from estimate.machines import machine, write_calibration
from shoal.estimate.cost.profile_file import read_profile


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_calibration(tmp_path / "calibration.toml", machine())
    monkeypatch.setenv("SHOAL_CALIBRATION", str(path))
    return path


def test_a_machine_that_was_not_calibrated_is_told_what_to_do(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CALIBRATION", str(tmp_path / "none.toml"))
    for what in ("image:tiny", "gpt2:small"):
        done = shoal("plan", what, "--cluster", "this")
        assert done.status == 2
        assert "run `shoal calibrate` first" in done.err


@pytest.mark.long
@pytest.mark.parametrize("what", ["language:tiny", "image:tiny"])
def test_a_job_of_any_kind_is_planned_for_this_machine(shoal: Shoal, calibrated: Path, what: str) -> None:
    done = shoal("plan", what, "--cluster", "this", "--json", "--top", "3")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert told["world"] == 2
    assert told["legal"] > 50
    times = [row["step_s"] for row in told["plans"]]
    assert len(times) == 3
    assert times == sorted(times)
    assert {"dp", "pp"} <= {row["family"] for row in told["families"]}
    shown = shoal("plan", what, "--cluster", "this", "--top", "3")
    assert told["plans"][0]["strategy"] in shown.out
    assert "Best of each family" in shown.out


def test_a_plan_for_a_link_ranks_dense_compressed_and_islands(shoal: Shoal, calibrated: Path) -> None:
    found, dense_s = {}, {}
    for link in ("400 Gb/s", "1 Mb/s"):
        done = shoal("plan", "language:tiny", "--cluster", "this", "--link", link, "--json", "--top", "1")
        assert done.status == 0, done.err
        found[link] = json.loads(done.out)["over_link"]
        scores = [row["step_s"] * row["slowdown"] for row in found[link]]
        assert scores == sorted(scores)
        assert {"dp(2)", "dp(2, sync=diloco(32))"} <= {row["strategy"] for row in found[link]}
        dense_s[link] = next(row["step_s"] for row in found[link] if row["strategy"] == "dp(2)") / scores[0]
    assert dense_s["400 Gb/s"] < 1.5
    assert dense_s["1 Mb/s"] > 5
    assert "sync=diloco(" in found["1 Mb/s"][0]["strategy"]
    shown = shoal("plan", "language:tiny", "--cluster", "this", "--link", "1 Mb/s", "--top", "1")
    assert f"So: {found['1 Mb/s'][0]['strategy']}" in shown.out
    for wrong in ("fast", "0 Mb/s", "50"):
        assert "--link" in shoal("plan", "language:tiny", "--cluster", "this", "--link", wrong).err


@pytest.mark.parametrize("option", [("--html", "x.html"), ("--by", "cost"), ("--price", "2"), ("--precision", "bf16")])
def test_what_a_plan_for_this_machine_cannot_do_is_refused(
    shoal: Shoal, calibrated: Path, option: tuple[str, str]
) -> None:
    done = shoal("plan", "language:tiny", "--cluster", "this", *option)
    assert done.status == 2
    assert f"{option[0]} " in done.err


def test_a_start_without_rows_is_refused(shoal: Shoal) -> None:
    done = shoal("calibrate", "--start", "good")
    assert done.status == 2
    assert "--from" in done.err


def test_a_shape_is_planned_for_this_machine(shoal: Shoal, calibrated: Path) -> None:
    done = shoal("plan", "gpt2:small", "--cluster", "this", "--batch", "8", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["cluster"]["devices"] == 2


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_run_trains_by_the_best_plan(shoal: Shoal, calibrated: Path, tmp_path: Path) -> None:
    done = shoal("plan", write_job(tmp_path), "--cluster", "this", "--run")
    assert done.status == 0, done.err
    assert "Training by " in done.out


def rows_of(path: Path, *, host_s: float, number: int = 12) -> None:
    """Steps of a framework whose host takes so long for each layer that nothing else shows."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            (
                "id",
                "layers",
                "hidden",
                "heads",
                "seq",
                "vocab",
                "gpu",
                "gpus",
                "micro_batch",
                "global_batch",
                "framework",
                "step_s",
            )
        )
        for row in range(number):
            layers = 8 + 4 * row
            seconds = 4 * layers * 2.5 * host_s
            writer.writerow((row, layers, 256, 4, 128, 1000, "H100 SXM5 80GB", 1, 1, 4, "mine", seconds))


def test_a_profile_is_learned_from_measured_steps_and_used(shoal: Shoal, tmp_path: Path) -> None:
    rows_of(tmp_path / "rows.csv", host_s=5e-3)
    done = shoal("calibrate", "--from", str(tmp_path / "rows.csv"), "--output", str(tmp_path / "mine.toml"), "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert told["median_error"] < 0.1 < told["median_error_before"]
    assert read_profile(str(tmp_path / "mine.toml")).host_layer_s == pytest.approx(5e-3, rel=0.2)
    plans = [
        json.loads(shoal("plan", "gpt2:small", "--cluster", "dgx-h100", "--devices", "1", "--json", *profile).out)
        for profile in ((), ("--profile", str(tmp_path / "mine.toml")))
    ]
    assert plans[1]["plans"][0]["step_s"] > plans[0]["plans"][0]["step_s"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no rows"), ("layers,hidden\n1,2\n", "0 rows have a step_s"), (None, "No such file")],
)
def test_rows_that_say_nothing_are_refused_in_a_sentence(
    shoal: Shoal, tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "rows.csv").write_text(text)
    done = shoal("calibrate", "--from", str(tmp_path / "rows.csv"))
    assert done.status == 2
    assert says in done.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("host_layers = 3", "it has an unknown key 'host_layers' (did you mean 'host_layer_s'?)"),
        ('host_layer_s = "fast"', "host_layer_s is 'fast'; expected a finite number, at least 0"),
        ("host_layer_s = -1", "host_layer_s is -1; expected a finite number, at least 0"),
        ("name = 1", "name is 1; expected text"),
        ("x", "it is not TOML"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_in_a_sentence(shoal: Shoal, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    done = shoal("plan", "gpt2:small", "--cluster", "dgx-h100", "--profile", str(tmp_path / "mine.toml"))
    assert done.status == 2
    assert says in done.err
