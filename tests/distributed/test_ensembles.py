"""Members of an ensemble are the runs that they would be alone, from seeds of their own, and are judged together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from distributed.trainer_jobs import job as small_job
from shoal.exporting.weights import CannotExport
from shoal.job import Batch, Job, TensorData
from shoal.launch import RankFailed, run_worlds
from shoal.launch.submit.request import CannotSubmit
from shoal.parallel.runnable import NotRunnable
from shoal.proof import members as proving
from shoal.strategy.members import member_seed, member_strategy
from shoal.training.local import train_job
from shoal.training.resumed import CannotTrain
from shoal.training.together import SoftTargets, classes_along, combined, measured_together

SPEC = f"{Path(__file__).parent / 'trainer_jobs.py'}:plain"
QUIET: dict[str, Any] = {"gate": False, "on_message": lambda message: None}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[shoal.Run, list[dict[str, Any]]]:
    """An ensemble of two members on two ranks each, and its student."""
    folder, said = tmp_path_factory.mktemp("ensemble") / "run", []
    strategy = "ensemble(2, distill=True) * dp(2, zero=1)"
    run = train_job(SPEC, strategy, folder=folder, gate=False, on_message=said.append)
    return run, said


def test_worlds_know_nothing_of_each_other() -> None:
    said: list[str] = []
    found = run_worlds(
        "distributed.ensemble_targets:meet",
        [{"value": 10}, {"value": 100}],
        ranks=2,
        on_message=lambda rank, message: said.append(f"{rank}: {message['text']}"),
    )
    assert [[row["sum"] for row in world] for world in found] == [[21, 21], [201, 201]]
    assert [[row["local"] for row in world] for world in found] == [[0, 1], [2, 3]]
    assert sorted(said) == ["0: 10.0", "1: 10.1", "2: 100.0", "3: 100.1"]


@pytest.mark.parametrize("member", [0, 1])
def test_a_member_is_its_own_plain_run_to_the_bit(
    trained: tuple[shoal.Run, list[dict[str, Any]]], tmp_path: Path, member: int
) -> None:
    run, _ = trained
    alone = train_job(SPEC, "dp(2, zero=1)", folder=tmp_path / "alone", seed=member_seed(run.seed, member), **QUIET)
    mine = shoal.load_run(run.folder / f"member-{member}")
    assert mine.losses == alone.losses
    for name, value in alone.model().state_dict().items():
        assert torch.equal(value, mine.model().state_dict()[name]), name


def test_members_differ_by_start_and_order(trained: tuple[shoal.Run, list[dict[str, Any]]]) -> None:
    run, _ = trained
    first, second = (shoal.load_run(run.folder / f"member-{member}") for member in range(2))
    assert first.seed != second.seed
    assert all(a != b for a, b in zip(first.losses, second.losses, strict=True))


def test_record_and_progress_say_what_members_reach_alone_and_together(
    trained: tuple[shoal.Run, list[dict[str, Any]]],
) -> None:
    run, said = trained
    told = next(message for message in said if message["event"] == "members")
    summary = run.summary
    assert run.status == "finished"
    assert run.world == 4
    assert summary["alone"] == told["alone"]
    for member, row in enumerate(summary["alone"]):
        record = shoal.load_run(run.folder / f"member-{member}")
        assert row["loss"] == pytest.approx(record.summary["metrics"]["loss"], rel=1e-5)
    assert summary["mean_alone"]["loss"] == pytest.approx(sum(row["loss"] for row in summary["alone"]) / 2)
    assert summary["metrics"] == summary["together"]
    models = [shoal.load_run(run.folder / f"member-{member}").model() for member in range(2)]
    data = small_job().validation
    assert data is not None
    batch = data.batch(list(range(len(data))))
    with torch.no_grad():
        mean = torch.stack([model(batch["x"]).softmax(-1) for model in models]).mean(0)
    by_hand = nn.functional.nll_loss(mean.log(), batch["y"])
    assert summary["together"]["loss"] == pytest.approx(float(by_hand), rel=1e-5)
    assert summary["combined"] == "mean of probabilities"
    assert summary["student"]["loss"] > 0
    assert {message.get("member") for message in said if message["event"] == "step"} == {0, 1, "student"}


def test_a_member_and_the_student_are_exported(trained: tuple[shoal.Run, list[dict[str, Any]]], tmp_path: Path) -> None:
    run, _ = trained
    for name in ("member-1", "student"):
        assert shoal.export(run.folder / name, to=str(tmp_path / f"{name}.safetensors")).tensors == 4
    with pytest.raises(CannotExport, match=r"member-0, member-1, student"):
        shoal.export(run.folder, to=str(tmp_path / "all.safetensors"))


def test_a_finished_ensemble_goes_on_with_more_steps(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    full = train_job(SPEC, "ensemble(2)", folder=tmp_path / "full", steps=8, **QUIET)
    train_job(SPEC, "ensemble(2)", folder=folder, steps=4, **QUIET)
    again = train_job(resume=str(folder), steps=8, **QUIET)
    assert again.strategy == "ensemble(2)"
    for member in range(2):
        name = f"member-{member}"
        assert shoal.load_run(folder / name).losses == shoal.load_run(full.folder / name).losses
    assert again.summary["together"] == full.summary["together"]


def test_verify_proves_each_member(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shoal.verify(SPEC, "ensemble(2) * dp(2)", steps=2)
    assert found.passed
    assert found.world == 4
    assert any("from the seeds 0, 1" in note for note in found.notes)
    # Planted: all members have the seed of the first.
    monkeypatch.setattr(proving, "member_seed", lambda seed, member: seed)
    found = shoal.verify(SPEC, "ensemble(2)", steps=2)
    assert not found.passed
    assert "members 0 and 1 are the same run" in found.worst


def job_of(outputs: Callable[[torch.Tensor], torch.Tensor], loss: Any) -> Job:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=drawn)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return outputs(self.line(x))

    data = TensorData(x=x, y=x[:, :3].argmax(1))
    return Job(
        name="together",
        model=Model,
        train=data,
        validation=data,
        loss=loss,
        global_batch=8,
        steps=1,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )


def cross_entropy(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), len(output)


def squares(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    return (output - batch["x"][:, :3]).square().sum(), output.numel()


@pytest.mark.parametrize(
    ("outputs", "loss", "along"),
    [
        (lambda x: 5 * x, cross_entropy, -1),
        (lambda x: x, squares, None),
        (lambda x: 5 * x.softmax(-1), lambda o, b: (-(o / 5).log()[range(len(o)), b["y"]].sum(), len(o)), None),
    ],
    ids=["logits", "regression", "probabilities"],
)
def test_logits_are_told_from_other_outputs(outputs: Any, loss: Any, along: int | None) -> None:
    job = job_of(outputs, loss)
    torch.manual_seed(3)
    models = [job.model() for _ in range(3)]
    batch = job.train.batch(list(range(8)))
    with torch.no_grad():
        said = [model(batch["x"]) for model in models]
        assert classes_along(job, said[0], batch) == along
        together = combined(said, along)
    mean = torch.stack([each.softmax(-1) if along else each for each in said]).mean(0)
    assert torch.allclose(together.exp() if along else together, mean, atol=1e-6)
    found = measured_together(job, models)
    assert found["together"]["loss"] <= found["mean_alone"]["loss"]  # Jensen: both losses are convex.


def test_a_student_learns_from_the_mean_of_its_teachers(trained: tuple[shoal.Run, list[dict[str, Any]]]) -> None:
    from shoal.runtime.options import JobOptions

    run, _ = trained
    folders = [str(run.folder / f"member-{member}") for member in range(2)]
    job = small_job()
    soft = SoftTargets(job, JobOptions(job=SPEC), folders)
    batch = {**job.train.batch(list(range(8)))}
    output = torch.randn(8, 3, requires_grad=True)
    loss, count = soft(output, batch)
    models = [shoal.load_run(Path(folder)).model() for folder in folders]
    with torch.no_grad():
        mean = torch.stack([model(batch["x"]).softmax(-1) for model in models]).mean(0)
    assert float(count) == 8
    (gradient,) = torch.autograd.grad(loss, output)
    assert torch.allclose(gradient, output.softmax(-1).detach() - mean, atol=1e-5)
    batch["y"] = batch["y"].clone()
    batch["y"][:3] = -100  # Rows that the labels do not count are not taught either.
    assert float(soft(output, batch)[1]) == 5


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("ensemble(2, distill=True) * tp(2)", r"tp\(2\)"),
        ("ensemble(2, distill=True) * pp(2)", "distill=False"),
        ("ensemble(2) * dp(2, via=ps(1))", "allreduce"),
    ],
)
def test_what_members_cannot_do_is_refused_by_name(strategy: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match=said):
        train_job(SPEC, strategy, folder=tmp_path / "run", **QUIET)


def test_where_members_cannot_be_started_it_is_refused_by_name(trained: tuple[shoal.Run, list[dict[str, Any]]]) -> None:
    with pytest.raises(CannotSubmit, match=r"submit dp\(2\) 3 times"):
        shoal.submit("mine.py", "ensemble(3) * dp(2)", on="slurm", nodes=2)
    with pytest.raises((NotRunnable, RankFailed), match="ranks know no other"):
        shoal.evaluate(trained[0].folder / "member-0", strategy="ensemble(2)")


def test_the_terms_of_a_member_are_those_inside() -> None:
    assert str(member_strategy(shoal.strategy.parse("ensemble(3) * dp(2, zero=1)"))) == "dp(2, zero=1)"
    assert str(member_strategy(shoal.strategy.parse("ensemble(3)"))) == "serial"
