"""Ctrl-C and SIGTERM: the run ends within seconds, says so, leaves nothing behind, and goes on where it stood."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cli.command import Place
from cli.conftest import Shoal
from cli.jobs import write_job

STEPS = 60
OPTIONS = ("--steps", str(STEPS), "--checkpoint-every", "20", "--strategy", "dp(2, zero=1)", "--folder", "run")


def record(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return facts


def curve(folder: Path, name: str = "steps.jsonl") -> list[tuple[int, Any]]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(row["step"], row.get("metrics", row.get("loss"))) for row in rows]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 40
    while time.monotonic() < end_s and process.poll() is None:
        if (folder / "steps.jsonl").exists() and len((folder / "steps.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached; exit status {process.poll()}")


def end_by(number: signal.Signals, place: Place, process: subprocess.Popen[str], *, to_group: bool) -> float:
    start_s = time.monotonic()
    if to_group:
        os.killpg(process.pid, number)  # As a terminal does: to the command, its server and every rank.
    else:
        process.send_signal(number)
    process.wait(30)
    seconds = time.monotonic() - start_s
    place.require_clean()
    return seconds


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["ctrl-c", "sigterm"]
)
def test_a_stopped_run_resumes_to_the_same_curve_to_the_bit(
    number: signal.Signals, to_group: bool, place: Place, shoal: Shoal, tmp_path: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    assert shoal("train", "language:tiny", *OPTIONS[:-1], str(undisturbed)).status == 0

    process = place.start("train", "language:tiny", *OPTIONS)
    wait_for_step(tmp_path / "run", 5, process)
    assert end_by(number, place, process, to_group=to_group) < 10
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "stopping after this step and writing a checkpoint" in err
    assert "shoal train --resume run" in out
    facts = record(tmp_path / "run")
    assert facts["status"] == "stopped"
    stopped_at = facts["summary"]["step"]
    assert 5 <= stopped_at < STEPS
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped_at:08d}").is_dir()

    # Job, steps and strategy need not be said again.
    done = shoal("train", "--resume", "run")
    assert done.status == 0, done.err
    facts = record(tmp_path / "run")
    assert (facts["status"], facts["strategy"]) == ("finished", "dp(2, zero=1)")
    assert [resumed["step"] for resumed in facts["resumed"]] == [stopped_at]
    assert curve(tmp_path / "run") == curve(undisturbed)
    assert curve(tmp_path / "run", "validation.jsonl") == curve(undisturbed, "validation.jsonl")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("after_s", [0.05, 0.5, 1.5])
def test_ctrl_c_before_the_first_step_ends_everything(after_s: float, place: Place) -> None:
    process = place.start("train", "language:tiny", "--strategy", "dp(2)", "--folder", "run")
    time.sleep(after_s)
    assert end_by(signal.SIGINT, place, process, to_group=True) < 10
    out, err = process.communicate()
    # So dies an interpreter that has not come to Shoal yet, or is still starting.
    if process.returncode != -signal.SIGINT and "Fatal Python error: init_import_site" not in err:
        assert process.returncode == 130, err
        assert "stopped" in err + out
        assert "Traceback" not in err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("during", ["the checks", "training"])
def test_a_second_ctrl_c_ends_at_once(during: str, place: Place, tmp_path: Path) -> None:
    sleeps = "if {} os.path.exists('run/run.json'): open('asleep', 'w').close(); time.sleep(20)"
    job = write_job(tmp_path, before="import time", loss=sleeps.format("not" if during == "the checks" else ""))
    process = place.start("train", job, "--strategy", "dp(2)", "--folder", "run")
    end_s = time.monotonic() + 40
    while not (tmp_path / "asleep").exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3 if during == "training" else 0.02)
    if during == "training":
        assert process.poll() is None
    if process.poll() is None:
        assert end_by(signal.SIGINT, place, process, to_group=True) < 5
    process.communicate()
    assert process.returncode == 130


@pytest.mark.timeout(60)
def test_a_killed_command_takes_its_ranks_with_it(place: Place, tmp_path: Path) -> None:
    process = place.start("train", "language:tiny", *OPTIONS)
    wait_for_step(tmp_path / "run", 2, process)
    assert end_by(signal.SIGKILL, place, process, to_group=False) < 10
    process.communicate()
    assert record(tmp_path / "run")["status"] == "running"
