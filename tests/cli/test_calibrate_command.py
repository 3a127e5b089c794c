"""`shoal calibrate`: what it shows and writes, and that what it wrote is what a training uses."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from cli.command import Place
from cli.conftest import Shoal
from cli.jobs import write_job
from shoal.comm.calibration import read_calibration
from shoal.training.record.run import read_run


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_what_it_wrote_is_what_a_training_uses(shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "configuration" / "file.toml"
    monkeypatch.setenv("SHOAL_CALIBRATION", str(path))
    done = shoal("calibrate", "--quick", "--force", "--ranks", "2")
    assert done.status == 0, done.err
    assert "measuring collectives and links: 100%" in done.err
    assert "measuring operators: 100%" in done.err
    for words in (
        "all-reduce",
        "64 KB",
        "gloo",
        "inside a host: ",
        " a message, ",
        "B/s",
        "(TCP on loopback)",
        "all-reduce of 2 ranks: ",
    ):
        assert words in done.out
    assert f"written to {path}" in done.err
    tables = tomllib.loads(path.read_text())
    assert tables["measured"]["ranks"] == 2
    assert min(tables["links"]["inside"]["latency_s"], tables["links"]["between"]["latency_s"]) > 1e-7
    found = read_calibration()
    assert found is not None
    assert shoal("train", write_job(tmp_path), "--steps", "1", "-s", "dp(2)", "--folder", "run").status == 0
    environment = read_run(tmp_path / "run").environment
    assert environment["links"] == asdict(found.network)
    assert environment["backend"] in (found.backend, f"shoal-{found.backend}")


@pytest.mark.processes
def test_a_training_takes_the_fastest_backend_and_the_algorithms_of_the_file(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At two ranks a butterfly sends one message, anything else two.
    link = "latency_s = {0}\nbyte_s = 1e-9\nreduce_byte_s = 0\n"
    text = "[links.inside]\n" + link + "[links.between]\n" + link + '[backend]\nfastest = "{1}"\n'
    monkeypatch.setenv("SHOAL_CALIBRATION", str(tmp_path / "file.toml"))
    messages = {}
    for latency_s, backend in ((1.0, "shoal"), (1e-12, "shoal"), (1.0, "gloo")):
        (tmp_path / "file.toml").write_text(text.format(latency_s, backend))
        folder = f"{backend}-{latency_s}"
        assert shoal("train", write_job(tmp_path), "--steps", "1", "-s", "dp(2)", "--folder", folder).status == 0
        run = read_run(tmp_path / folder)
        [gradient] = run.ledger.only("gradient").entries.values()
        messages[run.environment["backend"], latency_s] = gradient.messages
    assert messages["shoal-gloo", 1.0] == messages["shoal", 1e-12] == 2 * messages["shoal", 1.0]


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_broken_file_is_refused_by_a_training_and_mended_by_calibrating_anew(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.toml"
    path.write_text("[links")
    monkeypatch.setenv("SHOAL_CALIBRATION", str(path))
    monkeypatch.setenv("SHOAL_EMULATE", "1x2, 100ms, 1MB/s")
    done = shoal("train", write_job(tmp_path), "--steps", "1")
    assert done.status == 2
    assert done.err.startswith(f"shoal: the calibration file {path}: it is not TOML")
    assert done.err.count("\n") == 1
    done = shoal("calibrate", "--quick", "--links", "--force", "--ranks", "2", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["file"] == str(path)
    assert {row["collective"] for row in found["times"]} == {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}
    assert found["links"]["inside"]["latency_s"] < 0.05
    assert read_calibration() is not None


def test_nowhere_to_write_is_told_before_anything_is_measured(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CALIBRATION", "")
    done = shoal("calibrate")
    assert (done.status, done.out) == (2, "")
    assert "name one by --output" in done.err


def test_ranks_of_a_launcher_are_not_started_twice(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = shoal("calibrate", "--ranks", "2")
    assert done.status == 2
    assert "--ranks 2: the launcher has started the ranks already" in done.err


def test_the_command_itself_imports_no_torch(place: Place) -> None:
    code = "import sys, shoal.cli.calibrate; sys.exit('torch' in sys.modules)"
    assert place.run("-c", code).returncode == 0, sys.executable


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_figures_of_a_machine_that_others_use_are_shown_and_not_written(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.calibration.findings.TOO_MUCH_DISTURBED", -1.0)
    done = shoal("calibrate", "--quick", "--links", "--ranks", "2", "--output", "file.toml")
    assert done.status == 1
    assert "inside a host: " in done.out
    assert "nothing was written" in done.err
    assert not (tmp_path / "file.toml").exists()
