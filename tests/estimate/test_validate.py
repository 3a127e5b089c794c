"""Metrics of predictions on a case worked out by hand, and rows that cannot be predicted."""

from __future__ import annotations

import pytest

from shoal.estimate.cost.rows import BadRows
from shoal.estimate.validate import Prediction, predict, score


def row(
    name: str, *, step: str = "", status: str = "ok", memory: str = "", assumed: str = "", group: str = "g"
) -> dict[str, str]:
    return {
        "id": name,
        "source": "s",
        "group": group,
        "status": status,
        "step_s": step,
        "memory_gib": memory,
        "assumed": assumed,
    }


ROWS = [
    row("a", step="1.0", memory="10"),
    row("b", step="2.0", memory="20"),
    row("c", step="4.0"),
    row("d", status="oom"),
    row("e", status="oom", assumed="status"),
]
GUESSES = [
    Prediction(id="a", step_s=1.5, memory_gib=11, fits=True),
    Prediction(id="b", step_s=1.0, memory_gib=20, fits=True),
    Prediction(id="c", step_s=4.4, memory_gib=5, fits=True),
    Prediction(id="d", step_s=0.5, memory_gib=90, fits=False),
    Prediction(id="e", step_s=0.8, memory_gib=70, fits=True),
]


def test_errors_ranks_and_regret_of_a_case_worked_out_by_hand() -> None:
    told = score(ROWS, GUESSES)["s"]
    # Relative errors: +50 %, -50 %, +10 %.
    assert (told["n"], told["coverage"]) == (3, 1.0)
    assert (told["mape"], told["median_ape"], told["bias"], told["within_20"]) == (36.7, 50.0, 3.3, 33.3)
    # b is ranked first and took 2.0 where a took 1.0; a random pick takes 7/3.
    assert (told["groups"], told["regret_mean"], told["regret_random"]) == (1, 2.0, 2.333)
    assert told["spearman"] == 0.5
    assert (told["memory_n"], told["memory_mape"], told["memory_median_ape"]) == (2, 5.0, 5.0)


def test_out_of_memory_labels_and_the_planners_view() -> None:
    told = score(ROWS, GUESSES)["s"]
    assert (told["oom"]["tp"], told["oom"]["fp"], told["oom"]["fn"], told["oom"]["tn"]) == (1, 0, 1, 3)
    assert (told["oom_clean"]["n"], told["oom_clean"]["recall"]) == (4, 100.0)
    # The fastest plan said to fit is e, which did not.
    assert told["plan"] == {"groups": 1, "oom_or_none": 1, "regret_mean": None}


def test_ties_share_their_place_and_their_regret() -> None:
    guesses = [Prediction(id=each.id, step_s=1.0, fits=True) for each in GUESSES[:3]]
    told = score(ROWS[:3], guesses)["all"]
    assert told["spearman"] == 0.0
    assert told["regret_mean"] == told["regret_random"] == 2.333


MEASURED = {
    "id": "x",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "seq": "1024",
    "vocab": "51200",
    "gpu": "A100 SXM4 80GB",
    "gpus": "8",
    "micro_batch": "4",
    "global_batch": "64",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "framework": "Megatron-LM",
    "recompute": "full",
    "precision": "fp16",
    "surprise": "an unknown column",
}


def test_a_row_with_unknown_columns_and_few_known_ones_is_predicted() -> None:
    (guess,) = predict([MEASURED])
    assert 0.1 < (guess.step_s or 0) < 10
    assert 1 < (guess.memory_gib or 0) < 80
    assert guess.fits


@pytest.mark.parametrize(
    "changed",
    [
        {"cp": "2", "dp": "1"},
        {"experts": "8", "active_experts": "2", "ep": "2"},
        {"schedule": "zero-bubble"},
        {"precision": "fp8", "gpu": "H100 SXM5 80GB"},
        {"gpu": "V100 SXM2 16GB"},
        {"gpu": "GB200", "gpus_per_node": "4"},
        {"framework": "nobody knows it"},
        {"gpu": "H800", "intra_gb_s": "200"},
        {"zero": "3", "pp": "1", "dp": "4"},
    ],
)
def test_rows_of_every_kind_get_sensible_predictions(changed: dict[str, str]) -> None:
    (guess,) = predict([MEASURED | changed])
    assert 0.05 < (guess.step_s or 0) < 20


def test_a_row_that_cannot_be_predicted_says_why_and_the_others_are() -> None:
    first, second, third = predict([MEASURED | {"gpu": "abacus"}, MEASURED, MEASURED | {"layers": "many"}])
    assert first.step_s is None
    assert "no device is called 'abacus'" in first.reason
    assert second.step_s
    assert "layers is 'many'" in third.reason


def test_missing_columns_are_refused_by_name() -> None:
    with pytest.raises(BadRows, match="lacks the columns hidden, vocab"):
        predict([{name: value for name, value in MEASURED.items() if name not in ("hidden", "vocab")}])
