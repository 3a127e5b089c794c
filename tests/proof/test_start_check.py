"""What one process splits is checked too: micro-batches of coupled samples, and state that each of them changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.launch import RankFailed
from shoal.proof.certify import verify
from shoal.proof.gate import LayoutWrong
from shoal.strategy import parse
from shoal.training.local import train_job
from shoal.training.resumed import CannotTrain

pytestmark = pytest.mark.processes

JOB = """
import torch
from torch import nn
import torch.nn.functional as F
from shoal.job import Job, TensorData

class Follows(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x):
        out = self.line(x) / (1 + self.seen.abs())
        if self.training and FOLLOWS:
            with torch.no_grad():
                self.seen.lerp_(x.mean(0), 0.1)
        return out

class Frozen(Follows):
    # What moves is a parameter that does not learn, beside a buffer that is declared.

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        out = self.line(x) - self.centre.clone()
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(out.mean(0), 0.1)
                self.seen.lerp_(out.std(0), 0.1)
        return out

class Thawing(nn.Module):
    # A part that is frozen when the model is built is freed in the second step.

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += self.training
        self.first.requires_grad_(bool(self.calls > 1))
        return self.second(torch.relu(self.first(x)))

class Normalises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()

class Normalised(nn.Module):
    # A mean has another gradient than a sum that is divided by the count.

    def __init__(self):
        super().__init__()
        self.scale, self.up, self.down = nn.Parameter(torch.ones(6)), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(Normalises.apply(x * self.scale))))

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))

def by_sample(output, batch):
    return ((output - batch["y"]) ** 2).sum(), len(output)

def mean(output, batch):
    return ((output - batch["y"]) ** 2).mean(), 1

def contrastive(output, batch):
    return F.cross_entropy(output @ batch["y"].T, torch.arange(len(output)), reduction="sum"), len(output)

x = torch.randn(48, *SHAPE, generator=torch.Generator().manual_seed(1))
job = Job(
    name="small", model=MODEL, train=TensorData(x=x, y=x.flip(-1)), loss=LOSS, global_batch=12, steps=2,
    optimizer=lambda groups: torch.optim.OPTIMIZER(groups, lr=0.01), buffers=BUFFERS,
)
"""


def write(folder: Path, **values: str) -> str:
    given = {"FOLLOWS": "False", "SHAPE": "(6,)", "MODEL": "Follows", "LOSS": "by_sample", "OPTIMIZER": "SGD"}
    given |= {"BUFFERS": "None"} | values
    text = JOB
    for name, value in given.items():
        text = text.replace(name, value)
    (folder / "small.py").write_text(text, encoding="utf-8")
    return str(folder / "small.py")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_micro_batches_of_coupled_samples_are_refused_on_one_rank(tmp_path: Path) -> None:
    job = write(tmp_path, LOSS="contrastive")
    sentence = r"accumulate\(2\) splits the batch, but job 'small': the loss couples samples"
    with pytest.raises(CannotTrain, match=sentence):
        train_job(job, "accumulate(2)", folder=tmp_path / "run")


@pytest.mark.parametrize("strategy", ["serial", "tp(2)"])
def test_gradients_that_are_not_proportional_to_the_loss_are_refused_also_of_a_full_batch(
    strategy: str, tmp_path: Path
) -> None:
    job = write(tmp_path, MODEL="Normalised")
    with pytest.raises(CannotTrain, match="job 'small': its backward is not linear: for an eighth of the loss"):
        train_job(job, strategy, folder=tmp_path / "run")


def test_a_mean_trains_in_one_process_and_a_note_says_where_it_will_not(tmp_path: Path) -> None:
    job = write(tmp_path, LOSS="mean")
    found = []
    for number in range(2):
        messages: list[dict[str, Any]] = []
        train_job(job, "serial", folder=tmp_path / str(number), on_message=messages.append)
        found.append([message["text"] for message in messages if message["event"] == "note"])
    sentence = "strategies that split the batch will be refused: job 'small': the loss is a mean, not a sum"
    assert [text.startswith(sentence) for text in found[0]] == [True]
    assert found[1] == []  # It was found out, and said, once.


@pytest.mark.parametrize("follows", [True, False])
def test_what_each_micro_batch_changes_is_named(follows: bool, tmp_path: Path) -> None:
    job = write(tmp_path, FOLLOWS=str(follows))
    for number in range(2):  # Also of a run that is not checked again.
        messages: list[dict[str, Any]] = []
        train_job(job, "accumulate(2)", folder=tmp_path / str(number), on_message=messages.append)
        notes = [message["text"] for message in messages if message["event"] == "note"]
        assert any(text.startswith("per micro-batch: every forward changes seen") for text in notes) == follows, notes


def test_rounding_that_an_optimiser_makes_a_step_of_fails_no_proof(tmp_path: Path) -> None:
    # The bias of the keys has no effect on the loss: Rprop steps by the sign of its rounding.
    job = write(tmp_path, MODEL="Attends", SHAPE="(4, 6)", OPTIMIZER="Rprop")
    proof = verify(job, parse("dp(3)"), steps=6)
    assert proof.passed, (proof.worst, proof.max_rel_diff)
    assert proof.zero_gradient == ["qkv.bias"]
    assert any(note.startswith("where the true gradient is zero only gradients are compared") for note in proof.notes)


def test_a_failed_proof_names_the_buffer_that_replicas_change(tmp_path: Path) -> None:
    proof = verify(write(tmp_path, FOLLOWS="True"), parse("dp(2)"), steps=3)
    assert proof.verdict == "FAILED"
    assert any("declare what replicas do with it: Job(buffers={'seen': 'average'})" in note for note in proof.notes)


def test_a_frozen_parameter_that_replicas_change_is_named_beside_a_declared_buffer(tmp_path: Path) -> None:
    job = write(tmp_path, MODEL="Frozen", BUFFERS="{'seen': 'average'}")
    proof = verify(job, parse("dp(2)"), steps=3)
    assert proof.verdict == "FAILED"
    [note] = [note for note in proof.notes if note.startswith("each forward changes")]
    assert note.startswith("each forward changes centre, a parameter that does not learn, by the samples that it sees")
    with pytest.raises(LayoutWrong) as refused:
        train_job(job, "dp(2)", folder=tmp_path / "run")
    assert "the job declares 'average' for it" in str(refused.value)
    assert "A forward changes centre, which is no buffer, so each replica keeps its own" in str(refused.value)


@pytest.mark.parametrize("strategy", ["serial", "dp(2, zero=3)"])
def test_a_part_that_is_freed_later_than_optimizers_are_made_ends_the_run_by_name(
    strategy: str, tmp_path: Path
) -> None:
    # The gate's second step finds it where there is a gate.
    with pytest.raises((RankFailed, CannotTrain), match=r"the parameter first\.weight requires a gradient now"):
        train_job(write(tmp_path, MODEL="Thawing"), strategy, folder=tmp_path / "run")
