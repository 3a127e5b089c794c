"""fp16 with loss scaling, and the moving average of the weights, on real ranks against plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import trainer_jobs
from distributed.training_targets import curve
from shoal import load_run, parse
from shoal.checkpoint.opening import open_checkpoint
from shoal.parallel.loss_scale import GROW_AFTER, START, LossScale
from shoal.parallel.runnable import NotRunnable, require_runnable
from shoal.training.entry import train_run
from shoal.training.evaluate import evaluate_run

FILE = trainer_jobs.__file__
Ranks = Callable[..., list[Any]]


def run(ranks: Ranks, folder: Path, job: str, strategy: str, **options: Any) -> dict[str, Any]:
    arguments = {"job": f"{FILE}:{job}", "strategy": strategy, "folder": str(folder), "gate": False, **options}
    outcome: dict[str, Any] = ranks(train_run, arguments, ranks=parse(strategy).world)[0]
    return outcome


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["dp(2)", "dp(2, zero=3)", "dp(2, via=shared())", "pp(2, 'gpipe', micro=2)"])
def test_the_average_is_that_of_plain_pytorch_and_is_saved_resumed_exported(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    outcome = run(ranks, tmp_path, "averaged", strategy, checkpoint_every=2, steps=2)
    outcome = run(ranks, tmp_path, "averaged", strategy, checkpoint_every=2, resume=str(tmp_path))
    weights, average = trainer_jobs.average_by_hand(4, 0.5)
    for ema, expected in ((False, weights), (True, average)):
        model = load_run(tmp_path).model(ema=ema)
        for name, values in model.state_dict().items():
            assert torch.allclose(values, expected[name], atol=2e-6), (strategy, ema, name)
    assert not torch.allclose(weights["0.weight"], average["0.weight"], atol=1e-3)
    arguments = {"job": f"{FILE}:averaged", "run": str(tmp_path), "strategy": strategy, "ema": True}
    evaluated = ranks(evaluate_run, arguments, ranks=2)[0]["metrics"]
    assert outcome["metrics"]["ema_loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    assert outcome["metrics"]["ema_loss"] != pytest.approx(outcome["metrics"]["loss"], rel=1e-3)


@pytest.mark.parametrize("strategy", ["dp(2) * amp('fp16')", "dp(2, zero=3) * accumulate(2) * amp('fp16')"])
def test_fp16_skips_what_overflows_and_then_follows_float32(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    run(ranks, tmp_path / "half", "half_precision", strategy, checkpoint_every=8)
    found = rows(tmp_path / "half")
    skipped = [row["step"] for row in found if row["skipped"]]
    assert skipped == list(range(1, len(skipped) + 1)), found
    assert 1 <= len(skipped) <= 5
    assert found[-1]["loss_scale"] == START / 2 ** len(skipped)
    saved = open_checkpoint(tmp_path / "half" / "checkpoints" / "step-00000008").progress["loss_scale"]
    assert saved == {"factor": found[-1]["loss_scale"], "good_steps": 8 - len(skipped), "skipped": len(skipped)}
    run(ranks, tmp_path / "wide", "half_precision", "dp(2)", checkpoint_every=0)
    wide = rows(tmp_path / "wide")
    # Skipped steps leave the start as it was; norms are those of gradients, not of scaled ones.
    assert found[0]["loss"] == pytest.approx(wide[0]["loss"], rel=0.02)
    assert found[len(skipped)]["grad_norm"] < 10 * wide[len(skipped)]["grad_norm"]


def test_a_small_model_in_fp16_has_the_curve_of_float32(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, tmp_path / "half", "plain", "dp(2, zero=1) * amp('fp16')")
    run(ranks, tmp_path / "wide", "plain", "dp(2, zero=1)")
    half, wide = (dict(curve(tmp_path / name)) for name in ("half", "wide"))
    assert list(half.values()) != list(wide.values())
    assert list(half.values()) == pytest.approx(list(wide.values()), rel=0.03)
    assert not any(row["skipped"] for row in rows(tmp_path / "half"))


def test_the_scale_grows_halves_and_gives_up() -> None:
    scale = LossScale()
    assert all(scale.passed(1.0, 1.0) for _ in range(GROW_AFTER))
    assert scale.factor == 2 * START
    assert not scale.passed(1.0, float("inf"))
    assert (scale.factor, scale.good_steps, scale.skipped) == (START, 0, 1)
    again = LossScale()
    again.load(scale.to_json())
    assert again.to_json() == scale.to_json()
    while not scale.exhausted:
        scale.passed(float("nan"), 1.0)
    assert scale.factor < 1e-4


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("dp(2, compress=int8()) * amp('fp16')", "an overflow would stay in what compression has kept"),
        ("dp(2, via=ps(1)) * amp('fp16')", "servers update without knowing of an overflow"),
    ],
)
def test_what_cannot_be_scaled_is_refused(strategy: str, reason: str) -> None:
    with pytest.raises(NotRunnable, match=reason):
        require_runnable(parse(strategy))


def test_settings_replace_options_and_keep_ratios() -> None:
    from shoal.job.errors import JobError
    from shoal.job.overrides import overridden

    job = trainer_jobs.job(optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.1))
    changed = overridden(job, {"lr": 0.2, "weight_decay": 0.5, "clip": 2.0, "betas": [0.8, 0.9], "batch": 16})
    ones = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [ones[0]]}, {"params": [ones[1]], "lr": 0.01}]
    built = changed.optimizer(groups)
    assert [group["lr"] for group in built.param_groups] == pytest.approx([0.2, 0.02])
    assert [(group["weight_decay"], group["betas"]) for group in built.param_groups] == [(0.5, (0.8, 0.9))] * 2
    assert (changed.clip, changed.global_batch) == (2.0, 16)
    with pytest.raises(JobError, match=r"--set lrr: neither a field .* \(did you mean 'lr'\?\)"):
        overridden(job, {"lrr": 1}).optimizer([{"params": [torch.nn.Parameter(torch.ones(2))]}])
    with pytest.raises(JobError, match=r"--set betas=0.9: expected a value like the optimiser's own, \(0.9, 0.999\)"):
        overridden(job, {"betas": 0.9}).optimizer([{"params": [torch.nn.Parameter(torch.ones(2))]}])
    with pytest.raises(JobError, match="clip is 'x'"):
        overridden(job, {"clip": "x"})
