"""What `shoal submit` writes is what the engines take, and runs where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shoal
from launch import slurm
from shoal.launch.submit.request import CannotSubmit

yaml = pytest.importorskip("yaml")

CLUSTER: dict[str, Any] = {"on": "k8s", "image": "registry.example/shoal:1"}


def test_an_sbatch_script_asks_for_a_task_a_rank_and_starts_one_run() -> None:
    made = shoal.submit(
        "a b.py",
        "dp(2) * dp(4, zero=3)",
        on="slurm",
        nodes=2,
        minutes=30,
        gpus_per_node=4,
        name="run",
        sbatch=["--partition=gpu"],
        options=["--steps", "7"],
    )
    asked = [line.removeprefix("#SBATCH ") for line in made.text.splitlines() if line.startswith("#SBATCH ")]
    assert {"--nodes=2", "--ntasks-per-node=4", "--time=30", "--gpus-per-node=4", "--partition=gpu"} <= set(asked)
    assert "--signal=TERM@120" in asked  # Not B:, which signals the batch shell only.
    command = made.text.splitlines()[-1]
    assert command == (
        "exec srun --kill-on-bad-exit=1 shoal train 'a b.py' --strategy 'dp(2) * dp(4, zero=3)' --folder runs/run "
        "--go-on --steps 7"
    )


def manifests(job: str = "gpt.py", strategy: str = "dp(2) * tp(2)", nodes: int = 2, **more: Any) -> dict[str, Any]:
    text = shoal.submit(job, strategy, nodes=nodes, **CLUSTER, **more).text
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_an_indexed_job_is_legal_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = manifests(kind="job", minutes=90, gpus_per_node=2)
    for each in found.values():
        validate.validate(each, "1.37", strict=True)
    spec = found["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (2, 2, 5400)
    container = spec["template"]["spec"]["containers"][0]
    variables = {row["name"]: row.get("value") for row in container["env"]}
    assert (variables["PET_NNODES"], variables["PET_NPROC_PER_NODE"]) == ("2", "2")
    # Pods find rank 0 by the name that the headless service gives the first of them.
    assert variables["PET_MASTER_ADDR"] == f"gpt-0.{found['Service']['metadata']['name']}"
    assert found["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": found["Job"]["metadata"]["name"]}


def test_a_train_job_is_what_kubeflow_knows() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    given = manifests()["TrainJob"]
    known = models.TrainerV1alpha1TrainJob.from_dict(given)

    def same(read: Any, written: Any, path: str = "") -> None:
        """Unknown keys would be dropped silently."""
        if isinstance(written, Mapping):
            for key, value in written.items():
                assert key in read, f"{path}.{key} is not known"
                same(read[key], value, f"{path}.{key}")
        elif isinstance(written, list):
            for left, right in zip(read, written, strict=True):
                same(left, right, path)
        else:
            assert str(read) == str(written), path

    same(known.to_dict(), given)
    trainer = given["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert not any(row["name"].startswith("PET_") for row in trainer["env"])  # Kubeflow injects them, and refuses ours.


def test_a_driver_of_ray_is_a_program_with_the_options_of_the_run(tmp_path: Path) -> None:
    options = ["--batch", "8", "--no-gate"]
    made = shoal.submit("language:tiny", "dp(2)", on="ray", nodes=2, folder=tmp_path, options=options)
    compile(made.text, "driver.py", "exec")
    settings = made.text.partition("SETTINGS = ")[2].partition("\n")[0]
    assert "'global_batch': 8" in settings
    assert "'gate': False" in settings
    assert "num_workers=2" in made.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"on": "slurm", "nodes": 3}, "the strategy has 4 ranks, which 3 nodes cannot share evenly"),
    ({"on": "pbs", "nodes": 2}, "expected one of slurm, k8s, ray"),
    ({"on": "k8s", "nodes": 2}, "needs image"),
    ({**CLUSTER, "nodes": 2, "folder": "runs/a"}, "name a folder there, such as /shared/runs/gpt"),
    ({**CLUSTER, "nodes": 2, "kind": "pytorchjob"}, "expected trainjob"),
    ({**CLUSTER, "nodes": 2, "name": "My run"}, "expected lower-case letters"),
    ({"on": "slurm", "nodes": 2, "sbatch": ["-p x\nrm -rf /"]}, "expected an option of sbatch"),
    ({"on": "slurm", "nodes": 2, "options": ["--folder", "x"]}, "leave it out after --"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_what_cannot_be_submitted_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CannotSubmit) as refused:
        shoal.submit("gpt.py", "dp(4)", **given)
    assert sentence in str(refused.value)


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SHOAL_TOKEN")}
    return {**kept, "PYTHONPATH": paths, "PATH": path, "OMP_NUM_THREADS": "1"}


OPTIONS = ["--steps", "4", "--checkpoint-every", "2", "--no-gate"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(slurm.missing() is not None, reason=f"{slurm.missing()} is not installed (Debian: slurm-wlm munge)")
def test_a_script_sent_twice_to_slurm_is_one_run(tmp_path: Path) -> None:
    with slurm.slurm() as cluster:
        # Both nodes are this host, whose names n1 and n2 no resolver knows.
        own = {**environment(), "SLURM_CONF": cluster["SLURM_CONF"], "MASTER_ADDR": "127.0.0.1"}
        for steps in (4, 6):
            words = ["submit", "language:tiny", "-s", "dp(2)", "--nodes", "2", "--on", "slurm", "--sbatch=--wait"]
            done = subprocess.run(
                [sys.executable, "-m", "shoal", *words, "--send", "--", *OPTIONS[2:], "--steps", str(steps)],
                env=own,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=140,
                check=False,
            )
            said = "".join(path.read_text() for path in tmp_path.glob("*.out"))
            assert done.returncode == 0, done.stderr + said
            assert "Submitted batch job" in done.stdout
    record = json.loads((tmp_path / "runs" / "language-tiny" / "run.json").read_text())
    assert (record["world"], record["status"], record["summary"]["step"]) == (2, "finished", 6)
    assert [each["step"] for each in record["resumed"]] == [4]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_of_a_train_job_runs_under_the_variables_that_kubeflow_injects(tmp_path: Path) -> None:
    found = manifests(mount=str(tmp_path), nodes=1, strategy="dp(2)", job="language:tiny", options=OPTIONS)
    trainer = found["TrainJob"]["spec"]["trainer"]
    injected = {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(29000 + os.getpid() % 900),
        "SHOAL_TOKEN": "one",
    }
    done = subprocess.run(
        trainer["command"], env={**environment(), **injected}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "runs" / "language-tiny" / "run.json").read_text())
    assert (record["world"], record["status"]) == (2, "finished")


FAILS_ONCE = """
import os, pathlib
from dataclasses import replace
import torch
from shoal.job import load_job
tiny, mark = load_job("language:tiny"), pathlib.Path({mark!r})

class Fails(torch.optim.SGD):
    calls = 0
    def step(self, closure=None):
        Fails.calls += 1
        checkpoints = mark.parent / "run" / "checkpoints"
        if checkpoints.is_dir() and any(checkpoints.iterdir()) and os.environ.get("RANK") == "1" and not mark.exists():
            mark.touch()
            os._exit(7)
        return super().step(closure)

job = replace(tiny, optimizer=lambda groups: Fails(groups, lr=0.1))
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["torchrun", "ray"])
def test_a_run_goes_on_after_a_rank_has_died(tmp_path: Path, engine: str) -> None:
    (tmp_path / "job.py").write_text(FAILS_ONCE.format(mark=str(tmp_path / "mark")))
    options = ["--steps", "6", "--checkpoint-every", "2", "--no-gate"]
    if engine == "ray":
        pytest.importorskip("ray.train")
        made = shoal.submit(
            tmp_path / "job.py", "dp(2)", on="ray", nodes=1, folder=tmp_path / "run", options=options, retries=1
        )
        own_cluster = made.text.replace("ray.init()", "ray.init(num_cpus=2, include_dashboard=False)")
        (tmp_path / "driver.py").write_text(own_cluster)
        words = [sys.executable, str(tmp_path / "driver.py")]
    else:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "-m",
            "shoal",
            "train",
            str(tmp_path / "job.py"),
            "-s",
            "dp(2)",
            "--folder",
            str(tmp_path / "run"),
            "--go-on",
            *options,
        ]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "mark").exists()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["world"], record["status"], record["summary"]["step"]) == (2, "finished", 6)
    assert len(record["resumed"]) == 1
