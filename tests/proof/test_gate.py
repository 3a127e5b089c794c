"""The gate: a layout that breaks a model silently is stopped before it trains, a sound one is checked once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.job import load_file
from shoal.job.facts import build_without_memory
from shoal.layout.layout import facts_of, layout_of
from shoal.proof.fingerprint import fingerprint
from shoal.proof.gate import LayoutWrong, exact_twin
from shoal.proof.gate_question import question
from shoal.proof.proven import is_proven, proven_file, remember
from shoal.strategy import parse
from shoal.training.local import train_job
from shoal.training.record.run import Run

JOB = """
import torch
import torch.nn.functional as F
from torch import nn
from shoal.job import Job, TensorData, cross_entropy

NOTES = {{"first": torch.zeros(1, 1, 1).numpy()}}

def between(h):
    return {between}

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout({drop})

    def forward(self, x):
        parts = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))
        h = between(self.up(x))
        {inside}
        return x + self.drop(self.down(torch.tanh(h)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Block(number) for number in range(2))
        self.head = nn.Linear(16, 24)
        self.table = torch.ones(16)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head({head})

text = torch.randint(0, 24, (48, 9), generator=torch.Generator().manual_seed(3))
job = Job(
    name="words", model=Model, train=TensorData(x=text[:, :-1], y=text[:, 1:]), loss=cross_entropy,
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01), global_batch=12, steps=2,
    schedule=lambda step: {factor},
)
"""

THROUGH_NUMPY = """
        if self.number == 0:
            NOTES["first"] = h.detach().double().numpy()
        else:
            h = h + torch.from_numpy(NOTES["first"]).to(h.dtype).mean((1, 2), keepdim=True)
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def written(
        *, between: str = "h", inside: str = "pass", head: str = "x", drop: float = 0.0, factor: float = 1.0
    ) -> str:
        path = tmp_path / "words.py"
        path.write_text(
            JOB.format(between=between, inside=inside, head=head, drop=drop, factor=factor), encoding="utf-8"
        )
        return str(path)

    return written


def train(job: str, strategy: str, tmp_path: Path, **options: Any) -> tuple[Run, list[str]]:
    """The run, and what was said before it."""
    said: list[str] = []
    run = train_job(
        job,
        strategy,
        folder=tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}",
        on_message=lambda message: said.append(message["text"]) if "text" in message else None,
        checkpoint_every=0,
        **options,
    )
    return run, said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "changes", "advice"),
    [
        # A number that Python computes from what the block sees: half the positions, under cp.
        ("cp(2)", {"between": "h * (8.0 / h.shape[1])"}, "or leave cp out"),
        # Block 1 reads what block 0 left in a global, through numpy: it lies on another rank, under pp.
        ("pp(2)", {"inside": THROUGH_NUMPY}, "LayoutHints(stages=...)"),
    ],
)
def test_a_layout_that_breaks_the_model_silently_is_stopped_and_the_parameter_is_named(
    strategy: str, changes: dict[str, Any], advice: str, write: Callable[..., str], tmp_path: Path
) -> None:
    job = write(**changes, factor=0.0)  # Also where the first step has no learning rate yet.
    with pytest.raises(LayoutWrong) as stopped:
        train(job, strategy, tmp_path)
    told = str(stopped.value)
    assert f"the layout inferred for this model is wrong: under {strategy}, the gradient of " in told
    assert any(f"the gradient of {name}" in told for name, _ in load_file(job).model().named_parameters())
    assert advice in told
    assert "--no-gate" in told
    assert not proven_file().exists()
    assert not list(tmp_path.glob("run-*")), "nothing was trained"
    run, said = train(job, strategy, tmp_path, gate=False)
    assert run.status == "finished"
    assert said == []


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["pp(2) * dp(2)", "cp(2)", "tp(2) * amp('bf16')"])
def test_a_sound_layout_is_checked_once(strategy: str, write: Callable[..., str], tmp_path: Path) -> None:
    job = write()
    _, said = train(job, strategy, tmp_path)
    assert len(said) == 1
    assert said[0].startswith("checking the layout, once: two steps in float64 under ")
    run, said = train(job, strategy, tmp_path)
    assert said == []
    assert run.status == "finished"
    [entry] = json.loads(proven_file().read_text())["proven"].values()
    assert entry["job"] == "words"
    assert entry["strategy"] == str(exact_twin(parse(strategy)))
    assert entry["difference"] < 1e-10


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["dp(2, zero=1)", "dp(3)", "dp(2, via=shared())"])
def test_data_parallelism_alone_is_checked_once(strategy: str, write: Callable[..., str], tmp_path: Path) -> None:
    _, said = train(write(), strategy, tmp_path)
    assert said == [f"checking the strategy, once: two steps in float64 under {parse(strategy)}"]
    _, said = train(write(), strategy, tmp_path)
    assert said == []


@pytest.mark.processes
def test_dropout_of_any_kind_does_not_count_as_a_difference(write: Callable[..., str], tmp_path: Path) -> None:
    job = write(between="F.dropout(h, 0.3, training=True) * torch.rand_like(h)", drop=0.4)
    _, said = train(job, "tp(2)", tmp_path)
    assert len(said) == 1
    assert len(json.loads(proven_file().read_text())["proven"]) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"head": "x + torch.empty_like(x).random_() * 1e-9"},
            "the model's own forward draws random numbers by aten.random_.default",
        ),
        ({"head": "x + x @ self.table.diag()"}, "its serial step in float64 fails: RuntimeError"),
    ],
)
def test_what_cannot_be_compared_is_trained_and_said_to_be_unchecked(
    changes: dict[str, Any], why: str, write: Callable[..., str], tmp_path: Path
) -> None:
    run, said = train(write(**changes), "pp(2)", tmp_path)
    assert run.status == "finished"
    assert said[-1].startswith(f"the layout was not checked: {why}")
    assert not proven_file().exists()


NORMED = """
import torch
from torch import nn
from shoal.job import Job, TensorData, cross_entropy

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16, eps={eps}), nn.Linear(16, 4)

    def forward(self, x):
        # The gate computes in float64, where samples are so close that batch norm amplifies rounding.
        h = self.norm(self.up(1 + {spread} * x if x.dtype == torch.float64 else x))
        {fault}
        return self.down(torch.tanh(h))

numbers = torch.Generator().manual_seed(3)
job = Job(
    name="normed", model=Model, loss=cross_entropy, global_batch={batch}, steps=1, seed=1,
    train=TensorData(x=torch.randn(32, 6, generator=numbers), y=torch.randint(4, (32,), generator=numbers)),
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01),
)
"""


def normed(path: Path, *, spread: str, eps: str, batch: int, fault: str = "pass") -> str:
    path.write_text(NORMED.format(spread=spread, eps=eps, batch=batch, fault=fault), encoding="utf-8")
    return str(path)


@pytest.mark.processes
def test_a_batch_of_two_under_batch_norm_is_no_false_alarm(tmp_path: Path) -> None:
    job = normed(tmp_path / "normed.py", spread="1", eps="1e-5", batch=2)
    run, said = train(job, "dp(2)", tmp_path)
    assert run.status == "finished"
    assert len(said) == 1
    assert len(json.loads(proven_file().read_text())["proven"]) == 1


@pytest.mark.processes
def test_what_rounding_moves_is_not_called_wrong_and_a_fault_still_is(tmp_path: Path) -> None:
    ill = {"spread": "1e-8", "eps": "1e-40", "batch": 4}
    run, said = train(normed(tmp_path / "ill.py", **ill), "dp(2)", tmp_path)  # type: ignore[arg-type]
    assert run.status == "finished"
    assert "the strategy was not checked: rounding alone moves the gradient of " in said[-1]
    assert not proven_file().exists()
    by_rank = "h = h * (1 + 0.01 * (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))"
    with pytest.raises(LayoutWrong, match=r"another model than one process does: the gradient of \S+ differs"):
        train(normed(tmp_path / "wrong.py", fault=by_rank, **ill), "dp(2)", tmp_path)  # type: ignore[arg-type]


SOAP = """
import torch
from torch import nn
from shoal.job import Job, TensorData, cross_entropy

class Soap(torch.optim.Optimizer):
    # Adam in the eigenbasis of sums of gradient products, one basis for each side of a matrix.
    def __init__(self, params):
        super().__init__(params, {{"lr": 0.01}})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
                    state["left"], state["right"] = (torch.zeros(side, side).to(p) for side in p.shape)
                g = p.grad
                state["left"].mul_(0.5).add_(g @ g.T)
                state["right"].mul_(0.5).add_(g.T @ g)
                left, right = (torch.linalg.eigh(state[side])[1] for side in ("left", "right"))
                state["m"].mul_(0.5).add_(p.grad)
                turned = left.T @ g @ right
                state["v"].mul_(0.5).add_(turned * turned)
                step = left.T @ state["m"] @ right / (state["v"].sqrt() + 1e-8)
                p.sub_(group["lr"] * {scale} * (left @ step @ right.T))

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 8))

    def forward(self, x):
        return x @ self.weight.T

class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(*(layer for _ in range(2) for layer in (nn.Linear(8, 8, bias=False), nn.Tanh())), Linear())

def count(output, batch):
    # Linear in the weights: gradients are sums of small whole numbers, exact in any order.
    return (output * batch["t"]).sum(), len(output)

numbers = torch.Generator().manual_seed(3)
train = TensorData(
    x=torch.randint(-3, 4, (32, 8), generator=numbers).float(), y=torch.randint(6, (32,), generator=numbers),
    t=torch.randint(-3, 4, (32, 6), generator=numbers).float(),
)
common = dict(train=train, optimizer=Soap, global_batch=4, steps=2)
rounded = Job(name="rounded", model=Deep, loss=cross_entropy, **common)
exact = Job(name="exact", model=Linear, loss=count, **common)
"""


@pytest.mark.processes
def test_an_optimiser_of_eigenvectors_is_given_full_parameters_and_is_no_false_alarm(tmp_path: Path) -> None:
    job = tmp_path / "soap.py"
    job.write_text(SOAP.format(scale=1), encoding="utf-8")
    run, said = train(f"{job}:exact", "dp(2)", tmp_path)
    assert run.status == "finished"
    assert len(said) == 1, "checked, and right"
    # Gradients of four samples have less than full rank: of their eigenvectors some are nothing but rounding.
    run, said = train(f"{job}:rounded", "dp(2)", tmp_path)
    assert run.status == "finished"
    assert "not checked: rounding alone moves the update of " in said[-1]
    assert "(the gradients of the ranks are right)" in said[-1]


@pytest.mark.processes
def test_an_optimiser_of_eigenvectors_that_updates_differently_on_ranks_is_stopped(tmp_path: Path) -> None:
    job = tmp_path / "soap.py"
    by_rank = "(1 + 0.01 * (torch.distributed.is_initialized() and torch.distributed.get_rank() > 0))"
    job.write_text(SOAP.format(scale=by_rank), encoding="utf-8")
    with pytest.raises(LayoutWrong, match="Soap updates weight differently than in one process"):
        train(f"{job}:exact", "dp(2)", tmp_path)


def asked(job_file: str, strategy: str, **changes: Any) -> dict[str, Any]:
    job = replace(load_file(job_file), **changes)
    chosen = parse(strategy)
    found = question(job, chosen, facts_of(job, layout_of(job, chosen)))
    assert found is not None
    return found


def test_a_model_too_large_for_float64_is_not_checked(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write()
    assert asked(job, "pp(2)")["skip"] == ""

    class Little:
        available = 100_000

    monkeypatch.setattr("psutil.virtual_memory", Little)
    assert asked(job, "pp(2)")["skip"].startswith("in float64 it would need ")


def test_the_batch_is_the_smallest_with_two_samples_in_every_share(write: Callable[..., str]) -> None:
    job = write()
    assert asked(job, "tp(2)")["batch"] == 2
    assert asked(job, "pp(2, micro=3) * dp(2)")["batch"] == 12
    assert asked(job, "pp(2, micro=3)", global_batch=60)["batch"] == 6


def key_of(job_file: str, strategy: str = "tp(2)", **changes: Any) -> str:
    job = replace(load_file(job_file), **changes)
    return fingerprint(job, build_without_memory(job), parse(strategy))


def test_a_proof_is_kept_for_the_same_model_and_lost_with_any_change_of_it(write: Callable[..., str]) -> None:
    job = write()
    key = key_of(job)
    assert key == key_of(job, seed=4, steps=9), "what the layout does not depend on"
    assert key != key_of(job, global_batch=24), "samples may be coupled in larger batches only"
    others = [key_of(job, "tp(4)"), key_of(job, layout=shoal.LayoutHints(roles={"blocks.*": "whole"}))]
    others.append(key_of(job, loss=lambda output, batch: (output.sum(), 1)))
    others.append(key_of(write(between="h * 2")))  # A function that the block's code calls.
    others.append(key_of(write(inside="h = h + 1")))  # The block's own code.
    others.append(key_of(write(drop=0.5)))  # An attribute.
    assert len({key, *others}) == len(others) + 1
    assert key_of(write()) == key


@pytest.mark.parametrize(
    ("strategy", "twin", "axes"),
    [
        ("tp(2) * amp('bf16')", "tp(2)", ("tp",)),
        ("dp(2, zero=3) * pp(2, 'pipedream', micro=4)", "dp(2, zero=3) * pp(2, micro=4)", ("pp",)),
        ("pp(1) * cp(2) * ep(2)", "pp(1) * cp(2) * ep(2)", ("cp", "ep")),
        ("dp(4)", "dp(4)", ()),
        (
            "pp(2, '1f1b', micro=4) * dp(2, zero=1, compress=powersgd(4)) * tp(2)",
            "pp(2, '1f1b', micro=4) * dp(2, zero=1) * tp(2)",
            ("pp", "tp"),
        ),
        ("dp(2, compress=topk(0.1)) * dp(2) * accumulate(2)", "dp(2) * dp(2) * accumulate(2)", ()),
    ],
)
def test_the_check_runs_the_exact_strategy_with_the_same_cuts(strategy: str, twin: str, axes: tuple[str, ...]) -> None:
    assert exact_twin(parse(strategy)) == parse(twin)
    assert parse(strategy).cutting_axes == axes


@pytest.mark.parametrize("content", ["", "{", "[]", '{"proven": 3}', "[" * 100_000, "\0"])
def test_a_torn_file_of_proofs_costs_a_check_and_nothing_else(content: str) -> None:
    proven_file().parent.mkdir(parents=True)
    proven_file().write_text(content)
    assert not is_proven("a")
    remember("a", job="ünï")
    remember("b", job="two")
    assert is_proven("a")
    assert is_proven("b")
    assert sorted(path.name for path in proven_file().parent.iterdir()) == ["proven.json", "proven.key"]


def test_a_cache_folder_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    remember("a", job="one")
    assert not is_proven("a")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert proven_file() == tmp_path / ".cache" / "shoal" / "proven.json"
