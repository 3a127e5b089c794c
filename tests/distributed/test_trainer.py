"""What a trainer does between steps: callbacks, early stopping, and checkpoints of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from distributed import trainer_jobs
from distributed.trainer_jobs import rows
from distributed.training_targets import checkpoint_bytes, curve
from shoal import load_run
from shoal.checkpoint.opening import open_checkpoint
from shoal.checkpoint.restore import CheckpointMismatch
from shoal.launch import RankFailed
from shoal.runtime.options import WrongOption
from shoal.training.check import check
from shoal.training.entry import train_run
from shoal.training.monitor import Monitor
from shoal.training.options import TrainOptions
from shoal.training.pace import Pace
from shoal.training.saving import SharedTimer

FILE = trainer_jobs.__file__
Ranks = Callable[..., list[Any]]


def run(ranks: Ranks, folder: Path, job: str = "plain", *, target: Any = train_run, **options: Any) -> dict[str, Any]:
    arguments = {"job": f"{FILE}:{job}", "strategy": "dp(2, zero=1)", "folder": str(folder), "gate": False, **options}
    outcome: dict[str, Any] = ranks(target, arguments, ranks=2)[0]
    return outcome


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("stop_on", "at", "last"), [("on_step", 7, 8), ("on_evaluate", 6, 6), ("on_checkpoint", 6, 6)])
def test_callbacks_run_on_one_rank_in_order_and_end_the_run_on_all(
    tmp_path: Path, stop_on: str, at: int, last: int
) -> None:
    log = tmp_path / "log"
    run = shoal.train(
        trainer_jobs.plain(),
        "dp(2, zero=3)",
        callbacks=[trainer_jobs.Log(str(log), at, stop_on)],
        gate=False,
        folder=tmp_path / "run",
        checkpoint_every=3,
    )
    assert (run.status, len(run.steps), run.summary["ended"]) == ("finished", last, "enough")
    found = rows(log)
    assert len({row["pid"] for row in found}) == 1
    assert [row["step"] for row in found if row["event"] == "on_step"] == list(range(1, last + 1))
    assert [row["loss"] for row in found if row["event"] == "on_step"] == [x for _, x in curve(tmp_path / "run")]
    evaluated = [row for row in found if row["event"] == "on_evaluate"]
    assert [row["step"] for row in evaluated][:3] == [2, 4, 6]
    assert evaluated[2]["metrics"] == dict(curve(tmp_path / "run", "validation.jsonl"))[6]
    saved = [row["checkpoint"] for row in found if row["event"] == "on_checkpoint"]
    assert saved == [f"step-{step:08d}" for step in sorted({3, 6, last})]


def test_a_run_without_improvement_ends_and_stays_ended(ranks: Ranks, tmp_path: Path) -> None:
    outcome = run(ranks, tmp_path, "not_learning", patience=2, checkpoint_every=100, go_on=True)
    assert (outcome["status"], outcome["step"]) == ("finished", 6)  # The first evaluation is the record.
    assert outcome["ended"].startswith("loss has not improved on 1.")
    assert outcome["saved_step"] == 6
    again = run(ranks, tmp_path, "not_learning", patience=2, checkpoint_every=100, go_on=True)
    assert again["step"] == 6
    more = run(ranks, tmp_path, "not_learning", patience=4, checkpoint_every=100, resume=str(tmp_path))
    assert more["step"] == 10  # Of the four evaluations, two were before the resume.


def test_best_and_last_checkpoints_are_kept_and_async_ones_have_the_same_bytes(ranks: Ranks, tmp_path: Path) -> None:
    options = {"keep": 1, "keep_best": 2, "checkpoint_every": 5, "monitor": "loss", "better": "higher"}
    now = run(ranks, tmp_path / "now", **options)
    later = run(ranks, tmp_path / "later", checkpoint_async=True, **options)
    worst = sorted(dict(curve(tmp_path / "now", "validation.jsonl")).items(), key=lambda row: -row[1]["loss"])[:2]
    assert [row["step"] for row in now["best"]] == [step for step, _ in worst]
    expected = sorted({*(step for step, _ in worst), 12})
    assert kept(tmp_path / "now") == kept(tmp_path / "later") == expected
    assert now["best"] == later["best"]
    for step in expected:
        assert checkpoint_bytes(tmp_path / "now", step) == checkpoint_bytes(tmp_path / "later", step)
        path = tmp_path / "later" / "checkpoints" / f"step-{step:08d}"
        assert open_checkpoint(path).sums == open_checkpoint(tmp_path / "now" / "checkpoints" / path.name).sums
        assert {each.name for each in path.iterdir()} == {
            "checkpoint.json",
            "SHA256SUMS",
            "rank-00000.safetensors",
            "rank-00001.safetensors",
        }


def test_a_resumed_run_takes_its_job_and_options_from_the_run(tmp_path: Path) -> None:
    options = {"checkpoint_every": 3, "keep": 5, "set": {"lr": 0.02}, "global_batch": 4}
    first = shoal.train(f"{FILE}:plain", "dp(2, zero=1)", folder=tmp_path, steps=6, gate=False, **options)
    more = shoal.train(resume=tmp_path, steps=9)
    assert (more.folder, more.strategy, len(more.steps)) == (tmp_path, first.strategy, 9)
    assert kept(tmp_path) == [3, 6, 9]
    assert {name: more.arguments[name] for name in options} == options
    assert {row["lr"] for row in more.steps} == {0.02}
    other = shoal.train(resume=tmp_path / "checkpoints" / "step-00000006", strategy="dp(1)", folder=tmp_path / "other")
    assert (other.strategy, len(other.steps)) == ("dp(1)", 3)
    assert curve(tmp_path / "other")[-1][1] == pytest.approx(curve(tmp_path)[-1][1], rel=1e-5)


def test_a_failure_in_the_background_is_reported_and_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    target = trainer_jobs.train_on_a_full_disk
    arguments = {
        "job": f"{FILE}:plain",
        "strategy": "dp(2, zero=1)",
        "folder": str(tmp_path),
        "gate": False,
        "checkpoint_every": 2,
        "checkpoint_async": True,
        "steps": 8,
    }
    outcome = ranks(target, arguments, ranks=2, on_message=lambda rank, message: heard.append(message))[0]
    assert (outcome["status"], outcome["saved_step"]) == ("finished", 8)
    warned = [message["text"] for message in heard if message["event"] == "warning"]
    assert len(warned) == 1
    assert "the checkpoint of step 4 could not be written" in warned[0]
    assert "(rank 1): No space left on device" in warned[0]
    assert [message["step"] for message in heard if message["event"] == "checkpoint"] == [2, 6, 8]
    assert kept(tmp_path) == [6, 8]


def test_weights_are_exported_and_evaluated_but_not_resumed(ranks: Ranks, tmp_path: Path) -> None:
    full = run(ranks, tmp_path / "full", checkpoint_every=12)
    run(ranks, tmp_path / "weights", weights_only=True, checkpoint_every=12)
    model, other = (load_run(tmp_path / name).model().state_dict() for name in ("full", "weights"))
    assert all(bool((model[name] == other[name]).all()) for name in model)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors")) for name in ("full", "weights")
    ]
    assert sizes[1] < 0.5 * sizes[0]
    with pytest.raises((CheckpointMismatch, RankFailed), match="holds weights only"):
        run(ranks, tmp_path / "weights", resume=str(tmp_path / "weights"))
    from shoal.training.evaluate import evaluate_run

    arguments = {"job": f"{FILE}:plain", "run": str(tmp_path / "weights"), "strategy": "dp(2, zero=3)"}
    assert ranks(evaluate_run, arguments, ranks=2)[0]["metrics"] == pytest.approx(full["metrics"])


def test_minutes_are_those_of_one_clock_and_are_rarely_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr("shoal.training.saving.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "shoal.training.saving.exchange",
        lambda report, over: [asked.append(now[0]) or report],  # type: ignore[func-returns-value]
    )
    timer, due = SharedTimer(60.0), []
    for step in range(1, 2001):
        now[0] += 0.1
        if timer.due(step, 0.1, Pace(1), None):
            due.append(now[0])
    assert due == pytest.approx([60.0, 120.0, 180.0], abs=0.5)
    assert len(asked) < 50


def test_options_that_could_never_act_are_refused() -> None:
    def refused(job: str = "plain", **options: Any) -> str:
        with pytest.raises(WrongOption) as error:
            check(TrainOptions(job=f"{FILE}:{job}", strategy="dp(2)", **options), None)
        return str(error.value)

    assert "is higher or lower better?" in refused(monitor="accuracy", keep_best=1)
    assert "nothing looks at it" in refused(monitor="loss")
    assert "evaluates at its end only" in refused(patience=1, evaluate_every=0)
    assert "expected lower or higher" in refused(better="best")
    assert "at least 1 checkpoint must be kept" in refused(keep=0)


def test_the_best_are_ranked_and_patience_needs_the_least_change() -> None:
    options = TrainOptions(job="x", patience=2, keep_best=2, min_delta=0.1, monitor="loss")
    monitor = Monitor(options, trainer_jobs.job())
    taken = [monitor.update(step, {"loss": value}) for step, value in enumerate([1.0, 0.95, float("nan"), 0.7])]
    assert taken == [True, True, False, True]
    assert monitor.protected == {1, 3}
    assert (monitor.record, monitor.waited) == (0.7, 0)
    again = Monitor(options, trainer_jobs.job(), monitor.to_json())
    again.update(5, {"loss": 0.65})
    assert again.exhausted is None
    again.update(6, {"loss": 0.8})
    assert again.exhausted == "loss has not improved on 0.7 in the last 2 evaluations"
    with pytest.raises(WrongOption, match="the validation values are accuracy"):
        again.update(7, {"accuracy": 1.0})


def test_a_callback_that_would_never_be_called_is_refused() -> None:
    class Misspelt:
        def on_steps(self, state: Any) -> None: ...

    for given, said in (([Misspelt()], "has on_steps, which is never called"), ([print], "has none of on_step")):
        with pytest.raises(ValueError, match=said):
            trainer_jobs.job(callbacks=given)
