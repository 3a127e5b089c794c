"""Runs that cannot go on: one message that names the rank or the step, status 1, and what was good is kept."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import Place
from cli.conftest import Shoal
from cli.jobs import write_job
from shoal.checkpoint.opening import open_checkpoint
from shoal.training.record.run import read_run

pytestmark = pytest.mark.processes

ON_RANK_1 = "os.environ['RANK'] == '1'"


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def counting(then: str) -> str:
    """Lines for the loss function of a job that does something in its fifth training step and later. What is tried
    before training leaves no trace in `calls`."""
    return f"if output.requires_grad:\n    calls.append(1)\n    if len(calls) >= 5: {then}"


@pytest.mark.timeout(60)
def test_a_model_that_raises_ends_all_ranks_with_one_message(place: Place, tmp_path: Path) -> None:
    job = write_job(tmp_path, forward=f"if {ON_RANK_1}: raise RuntimeError('this layer is ünwell\\nand more')")
    done = place.shoal("train", job, "--strategy", "dp(3)", "--folder", "run", "--no-gate")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "shoal: rank 1 failed: RuntimeError: this layer is ünwell"
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "line.py" in done.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["status"], facts["reason"]) == ("failed", "rank 1 failed: RuntimeError: this layer is ünwell")


def test_a_rank_that_is_killed_is_named_and_recorded(shoal: Shoal, tmp_path: Path) -> None:
    killed = counting(f"os.kill(os.getpid(), 9) if {ON_RANK_1} else None")
    job = write_job(tmp_path, before="calls = []", loss=killed)
    done = shoal("train", job, "-s", "dp(2)", "--folder", "run", "--no-gate", "--checkpoint-every", "2")
    assert done.status == 1
    assert "shoal: rank 1 was killed by SIGKILL" in done.err
    run = read_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.reason is not None
    assert run.reason.startswith("rank 1 was killed by SIGKILL")
    assert checkpoints(tmp_path / "run") == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_no_number_stops_at_its_step_and_keeps_the_last_checkpoint(
    value: str, shoal: Shoal, tmp_path: Path
) -> None:
    job = write_job(tmp_path, before="calls = []", loss=counting(f"output = output * float('{value}')"))
    done = shoal("train", job, "-s", "dp(2, zero=1)", "--folder", "run", "--no-gate", "--checkpoint-every", "2")
    assert done.status == 1
    assert f"shoal: step 5: the loss is {value}" in done.err
    assert "the checkpoint of step 4 is kept in run. A lower learning rate" in done.err
    assert "Traceback" not in done.err
    assert read_run(tmp_path / "run").status == "failed"
    assert len(read_run(tmp_path / "run").steps) == 4
    assert checkpoints(tmp_path / "run") == ["step-00000002", "step-00000004"]
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000004").step == 4


@pytest.mark.parametrize("strategy", ["serial", "dp(2, zero=3)"])
def test_a_gradient_that_is_no_number_stops_at_its_step_also_without_clipping(
    strategy: str, shoal: Shoal, tmp_path: Path
) -> None:
    spoiled = counting("output.register_hook(lambda gradient: gradient * float('nan'))")
    job = write_job(tmp_path, before="calls = []", loss=spoiled, clip=None)
    done = shoal("train", job, "-s", strategy, "--folder", "run", "--no-gate", "--checkpoint-every", "1")
    assert done.status == 1
    assert "shoal: step 5: the norm of the gradient is nan" in done.err
    assert "the checkpoint of step 4 is kept in run" in done.err
    assert checkpoints(tmp_path / "run") == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("strategy", ["serial", "dp(2, zero=3)"])
def test_parameters_that_are_no_numbers_never_replace_a_good_checkpoint(
    strategy: str, shoal: Shoal, tmp_path: Path
) -> None:
    # Loss and gradient of the fifth step are finite; its learning rate is not.
    job = write_job(tmp_path, schedule="float('inf') if step == 4 else 1.0")
    done = shoal("train", job, "-s", strategy, "--folder", "run", "--no-gate", "--checkpoint-every", "1")
    assert done.status == 1
    assert "shoal: step 5: the parameter layers." in done.err
    assert "is no longer finite; the checkpoint of step 4 is kept in run" in done.err
    assert checkpoints(tmp_path / "run") == ["step-00000003", "step-00000004"]


def test_a_long_evaluation_is_no_hang(shoal: Shoal, tmp_path: Path) -> None:
    slow = "import time\nif not output.requires_grad: time.sleep(0.1)"
    job = write_job(tmp_path, loss=slow)
    done = shoal("train", job, "-s", "dp(2)", "--steps", "1", "--hang-after", "1")
    assert done.status == 0, done.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs root, to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.root
def test_a_full_disk_costs_a_checkpoint_not_the_run(small_disk: Path, shoal: Shoal, tmp_path: Path) -> None:
    job, run = write_job(tmp_path, hidden=8000), small_disk / "run"
    assert shoal("train", job, "--folder", "whole", "-s", "dp(2)", "--checkpoint-every", "0").status == 0

    done = shoal("train", job, "--folder", str(run), "-s", "dp(2)", "--checkpoint-every", "3")
    assert done.status == 1
    assert done.err.count("warning: the checkpoint of step") == 2
    assert "warning: the checkpoint of step 6 could not be written" in done.err
    assert "No space left on device" in done.err
    assert "training goes on" in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("shoal: the checkpoint of step 12 could not be written")
    assert f"The last good checkpoint is {run}/checkpoints/step-00000003." in last
    assert checkpoints(run) == ["step-00000003"]
    assert len(read_run(run).steps) == 12
    assert read_run(run).status == "failed"

    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    done = shoal("train", job, "--resume", str(run))
    assert done.status == 0, done.err
    assert read_run(run).losses == read_run(tmp_path / "whole").losses
    assert read_run(run).status == "finished"


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal")


@pytest.mark.timeout(120)
def test_under_torchrun_the_run_is_the_same_and_rank_0_speaks_for_all(
    place: Place, shoal: Shoal, tmp_path: Path
) -> None:
    job = write_job(tmp_path)
    assert shoal("train", job, "-s", "dp(2, zero=1)", "--folder", "local").status == 0
    done = place.run(*TORCHRUN, "train", job, "--strategy", "dp(2, zero=1)", "--steps", "6", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["status"], outcome["world"]) == ("finished", 2)
    [folder] = (tmp_path / "runs").iterdir()
    assert outcome["folder"] == f"runs/{folder.name}"
    assert done.stderr.count("step 6/6") == 1

    # The ranks of a launcher find the newest intact checkpoint together.
    (folder / "checkpoints" / "step-00000006" / "rank-00001.safetensors").write_bytes(b"")
    done = place.run(*TORCHRUN, "train", job, "--resume", str(folder), "--steps", "12")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step-00000006 is passed over") == 1
    assert read_run(folder).losses == read_run(tmp_path / "local").losses


@pytest.mark.timeout(120)
def test_under_torchrun_what_stops_all_ranks_is_said_once(place: Place, tmp_path: Path) -> None:
    job = write_job(tmp_path, before="calls = []", loss=counting("output = output * float('nan')"))
    done = place.run(*TORCHRUN, "train", job, "--strategy", "dp(2)", "--folder", "run", "--no-gate")
    assert done.returncode == 1
    assert done.stderr.count("shoal: step 5: the loss is nan") == 1
