"""fp16 under every kind of axis against a plain loop with PyTorch's GradScaler: the same steps are skipped by all
ranks, the scale grows and falls alike, and the weights agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import overflow_jobs
from shoal import load_run, parse

Ranks = Callable[..., list[Any]]
expected = cache(overflow_jobs.by_hand)

STRATEGIES = [
    "amp('fp16')",
    "dp(2, zero=2) * amp('fp16')",
    "dp(2, via=shared()) * amp('fp16')",
    "dp(2, zero=3) * accumulate(2) * amp('fp16')",
    "pp(2, 'gpipe', micro=2) * amp('fp16')",
    "pp(2, '1f1b', micro=4) * amp('fp16')",
    "tp(2) * amp('fp16')",
    "pp(2, '1f1b', micro=2) * tp(2) * amp('fp16')",
    "pp(2, '1f1b', micro=2) * dp(2, zero=1) * amp('fp16')",
]


def test_the_plain_loop_skips_the_steps_that_the_data_decide() -> None:
    rows, _ = expected()
    skipped = [step for step, row in enumerate(rows) if row["skipped"]]
    assert skipped == sorted({**overflow_jobs.IN_FIRST_LAYER, **overflow_jobs.IN_LOSS})
    assert {row["scale"] for row in rows} >= {512.0, 1024.0, 2048.0}
    assert any(row["norm"] > overflow_jobs.CLIP for row in rows if not row["skipped"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_skipped_scale_and_weights_are_those_of_the_plain_loop(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    arguments = {
        "job": f"{overflow_jobs.__file__}:overflowing", "strategy": strategy, "folder": str(tmp_path), "gate": False,
        "checkpoint_every": overflow_jobs.STEPS,
    }  # fmt: skip
    target = overflow_jobs.train_with_a_scale_that_grows_soon
    ranks(target, arguments, ranks=parse(strategy).world)
    rows, weights = expected()
    found = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in found] == [row["skipped"] for row in rows]
    assert [row["loss_scale"] for row in found] == [row["scale"] for row in rows]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in rows], rel=1e-2)
    norms = [(row["grad_norm"], own["norm"]) for row, own in zip(found, rows, strict=True) if not own["skipped"]]
    assert [norm for norm, _ in norms] == pytest.approx([own for _, own in norms], rel=1e-2)
    trained = load_run(tmp_path).model().state_dict()
    for name, values in weights.items():
        assert torch.allclose(trained[name], values, atol=2e-3), (name, (trained[name] - values).abs().max())
