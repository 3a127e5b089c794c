"""The gate on the command line: `--no-gate`, what is remembered, and ranks that torchrun started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import Place
from cli.conftest import Shoal

pytestmark = pytest.mark.processes

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shoal")

# The first layer leaves a note for the second where no analysis sees it, and under pp no rank either.
JOB = """
import torch
from torch import nn
from shoal.job import Job, TensorData

class Layer(nn.Module):
    notes = {"x": torch.zeros(1, 1).numpy()}

    def __init__(self, number):
        super().__init__()
        self.number, self.line = number, nn.Linear(6, 6)

    def forward(self, x):
        if self.number == 0:
            Layer.notes["x"] = x.detach().double().numpy()
        elif BROKEN:
            x = x + torch.from_numpy(Layer.notes["x"]).to(x.dtype).mean(1, keepdim=True)
        return torch.tanh(self.line(x) * 3)

def loss(output, batch):
    return ((output - batch["y"]) ** 2).sum(), len(output)

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
job = Job(
    name="notes", model=lambda: nn.Sequential(nn.Linear(6, 6), Layer(0), Layer(1)), train=TensorData(x=x, y=x.flip(1)),
    loss=loss, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01), global_batch=12, steps=2,
)
"""
CHECKING = "checking the layout, once"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, *, broken: bool) -> str:
    (folder / "notes.py").write_text(JOB.replace("BROKEN", str(broken)), encoding="utf-8")
    return "notes.py"


def test_a_wrong_layout_ends_the_command_with_2_and_no_gate_trains_all_the_same(shoal: Shoal, tmp_path: Path) -> None:
    job = write(tmp_path, broken=True)
    done = shoal("train", job, "-s", "pp(3)")
    assert done.status == 2
    assert CHECKING in done.err
    assert "shoal: the layout inferred for this model is wrong: under pp(3), the gradient of " in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()
    done = shoal("train", job, "-s", "pp(3)", "--no-gate", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["status"] == "finished"


def test_what_is_checked_is_remembered_by_job_and_strategy(shoal: Shoal, tmp_path: Path) -> None:
    job = write(tmp_path, broken=False)
    assert shoal("verify", job, "-s", "pp(2)", "--steps", "1", "--batch", "4").status == 0
    done = shoal("train", job, "-s", "pp(2)")
    assert done.status == 0, done.err
    assert CHECKING in done.err, "a certificate of one step from where the job starts is no check of the gate's kind"
    assert CHECKING not in shoal("train", job, "-s", "pp(2)").err
    assert CHECKING in shoal("train", job, "-s", "pp(3)").err, "another strategy"
    assert CHECKING in shoal("train", job, "-s", "pp(2)", "--backend", "gloo").err, "another backend"


def test_what_verify_has_refuted_is_not_taken_for_proven(shoal: Shoal, tmp_path: Path) -> None:
    job = write(tmp_path, broken=True)
    assert shoal("verify", job, "-s", "pp(3)", "--steps", "2").status == 1
    assert shoal("train", job, "-s", "pp(3)").status == 2


@pytest.mark.timeout(120)
def test_under_torchrun_the_ranks_check_the_layout_themselves(place: Place, tmp_path: Path) -> None:
    job = write(tmp_path, broken=False)
    done = place.run(*TORCHRUN, "train", job, "--strategy", "pp(2)", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(CHECKING) == 1
    assert json.loads(done.stdout)["status"] == "finished"
    assert "notes" in (tmp_path / "cache" / "shoal" / "proven.json").read_text()

    write(tmp_path, broken=True)
    done = place.run(*TORCHRUN, "train", job, "--strategy", "pp(2)", "--folder", "broken")
    assert done.returncode == 1
    # The note is one of another batch there, so the stage that reads it fails instead of computing something else.
    assert done.stderr.count("shoal: the model runs in one process but fails under pp(2)") == 1
    assert not (tmp_path / "broken").exists()


@pytest.mark.timeout(60)
def test_under_torchrun_one_rank_checks_its_job_too(place: Place, tmp_path: Path) -> None:
    hooked = (
        JOB.replace("BROKEN", "False")
        .replace(
            "job = Job(",
            """
def model():
    line = nn.Linear(6, 6)
    line.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return line

job = Job(""",
        )
        .replace("lambda: nn.Sequential(nn.Linear(6, 6), Layer(0), Layer(1))", "model")
    )
    (tmp_path / "notes.py").write_text(hooked, encoding="utf-8")
    alone = [argument.replace("2", "1") if argument.isdigit() else argument for argument in TORCHRUN]
    done = place.run(*alone, "train", "notes.py", "--folder", "hooked")
    assert done.returncode == 1
    assert "its backward is not linear: for an eighth of the loss the gradient of weight" in done.stderr
    assert not (tmp_path / "hooked").exists()
