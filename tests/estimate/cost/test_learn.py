"""A profile is recovered from steps that it made itself, and rows that stall do not spoil it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.estimate.cost import GOOD, inputs_from_rows, price
from shoal.estimate.cost.learn import learn_profile

HABITS = replace(GOOD, host_layer_s=3e-3, hop_ratio=6.0, elementwise=1.3)


def rows() -> list[dict[str, str]]:
    found = []
    for tp, dp in ((1, 16), (2, 8), (4, 4), (8, 2), (1, 64), (2, 32), (8, 8)):
        for micro in (1, 2, 4, 8):
            found.append(
                {
                    "id": f"{tp}-{dp}-{micro}",
                    "layers": "24",
                    "hidden": "2048",
                    "heads": "16",
                    "seq": "2048",
                    "vocab": "51200",
                    "gpu": "H100 SXM5 80GB",
                    "gpus": str(tp * dp),
                    "tp": str(tp),
                    "dp": str(dp),
                    "micro_batch": str(micro),
                    "global_batch": "512",
                    "precision": "bf16",
                }
            )
    for row, step_s in zip(found, price(inputs_from_rows(found), HABITS).step_s, strict=True):
        row["step_s"] = repr(float(step_s))
    return found


def test_a_learned_profile_predicts_steps_it_has_not_seen() -> None:
    given = rows()
    inputs, real = inputs_from_rows(given), np.array([float(row["step_s"]) for row in given])
    seen, unseen = given[::2], np.arange(1, len(given), 2)
    stalled = [row | {"step_s": "90.0"} if number == 3 else row for number, row in enumerate(seen)]
    before = abs(price(inputs, GOOD).step_s / real - 1)[unseen]
    after = abs(price(inputs, learn_profile(stalled, GOOD)).step_s / real - 1)[unseen]
    assert np.median(before) > 0.3
    assert np.median(after) < 0.05


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows have a step_s"):
        learn_profile(rows()[:2], GOOD)
