"""fp16 under every kind of axis against a plain loop with PyTorch's GradScaler: the same steps are skipped by all
ranks, the scale grows and falls alike, and the weights agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import overflow_jobs
from shoal import parse

Ranks = Callable[..., list[Any]]

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
    rows, _ = overflow_jobs.by_hand()
    skipped = [step for step, row in enumerate(rows) if row["skipped"]]
    assert skipped == sorted({**overflow_jobs.IN_FIRST_LAYER, **overflow_jobs.IN_LOSS})
    assert {row["scale"] for row in rows} >= {512.0, 1024.0, 2048.0}
    assert any(row["norm"] > overflow_jobs.CLIP for row in rows if not row["skipped"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_skipped_scale_and_weights_are_those_of_the_plain_loop(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    arguments = {
        "job": f"{overflow_jobs.__file__}:overflowing",
        "strategy": strategy,
        "folder": str(tmp_path),
        "gate": False,
        "checkpoint_every": overflow_jobs.STEPS,
    }
    target = overflow_jobs.train_with_a_scale_that_grows_soon
    ranks(target, arguments, ranks=parse(strategy).world)
    overflow_jobs.compare(tmp_path)
