"""Ranks that MPI or Slurm have started become ranks of one job, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import slurm
from shoal.launch.engines import EngineError, adopt, first_host, refuse_several

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1234",
}


def test_a_task_of_a_slurm_step_is_a_rank() -> None:
    found = dict(STEP)
    assert adopt(found) == "Slurm"
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == ("3", "4", "1", "node07")
    other = {**STEP, "SLURM_PROCID": "0"}
    adopt(other)
    assert other["MASTER_PORT"] == found["MASTER_PORT"]


def test_a_batch_shell_and_a_step_of_one_task_are_no_ranks() -> None:
    for one in ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}):
        before = dict(one)
        assert adopt(one) is None
        assert one == before


def test_torchrun_comes_before_mpi_and_mpi_before_slurm() -> None:
    both = {**STEP, **MPI}
    assert adopt(both) == "Open MPI"
    assert (both["RANK"], both["WORLD_SIZE"], both["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
    started = {**both, "RANK": "0", "WORLD_SIZE": "8"}
    assert adopt(started) is None
    assert started["RANK"] == "0"


def test_mpi_on_several_hosts_needs_the_address_of_rank_0() -> None:
    spread = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(EngineError, match="mpirun -x MASTER_ADDR=HOST"):
        adopt(dict(spread))
    given = {**spread, "MASTER_ADDR": "a"}
    assert adopt(given) == "Open MPI"
    assert given["MASTER_ADDR"] == "a"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],x", "gpu03"), ("a[1]-ib", "a1-ib"), ("r-2-n[10,12]", "r-2-n10")],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_what_starts_its_own_ranks_is_refused_for_several() -> None:
    refuse_several("verify", {"WORLD_SIZE": "1"})
    with pytest.raises(EngineError, match="started `shoal verify` 2 times"):
        refuse_several("verify", {"WORLD_SIZE": "2"})


def _environment() -> dict[str, str]:
    mine = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in mine.items() if name not in ("RANK", "WORLD_SIZE", "SHOAL_TOKEN")}


def _train(
    prefix: list[str], folder: Path, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", "train", "language:tiny", "-s", "dp(2)", "--steps", "4", "--no-gate"]
    return subprocess.run(
        [*prefix, *command, "--folder", str(folder), "--checkpoint-every", "2", *words],
        env={**_environment(), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)")
def test_mpirun_starts_one_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    prefix = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = _train(prefix, tmp_path / "run", "--go-on")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["world"], record["status"], record["summary"]["step"]) == (2, "finished", 4)
    again = _train(prefix, tmp_path / "run", "--go-on", "--steps", "6")
    assert again.returncode == 0, again.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["summary"]["step"] == 6
    assert [each["step"] for each in record["resumed"]] == [4]


@pytest.mark.processes
@pytest.mark.skipif(slurm.missing() is not None, reason=f"{slurm.missing()} is not installed (Debian: slurm-wlm munge)")
def test_srun_starts_one_job_of_all_its_tasks(tmp_path: Path) -> None:
    with slurm.slurm() as cluster:
        # Both nodes are this host, whose names n1 and n2 no resolver knows.
        own = {name: cluster[name] for name in ("SLURM_CONF", "PATH")} | {"MASTER_ADDR": "127.0.0.1"}
        done = _train(["srun", "-N2", "--ntasks-per-node=1"], tmp_path / "run", environment=own)
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (record["world"], record["status"], record["summary"]["step"]) == (2, "finished", 4)
        proof = subprocess.run(
            ["srun", "-n2", sys.executable, "-m", "shoal", "verify", "language:tiny", "-s", "dp(2)"],
            env={**_environment(), **own},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert proof.returncode != 0
        assert "a launcher has started `shoal verify` 2 times" in proof.stderr


@pytest.mark.processes
def test_one_command_starts_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert _train([], folder, "--go-on").returncode == 0
    again = _train([], folder, "--go-on", "--steps", "6")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    record = json.loads((folder / "run.json").read_text())
    assert record["environment"]["collective_timeout_s"] == 1800.0
    assert "--folder" in _train([], folder).stderr  # Without it the folder is taken.


@pytest.mark.processes
def test_a_run_that_ended_before_its_first_checkpoint_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert _train([], folder, "--go-on", "--checkpoint-every", "0").returncode == 0
    again = _train([], folder, "--go-on")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
