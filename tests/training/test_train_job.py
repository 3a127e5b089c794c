"""`train_job` refuses what it cannot honour before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal import dp
from shoal.training.local import train_job
from shoal.training.resumed import CannotTrain


def test_a_misspelt_option_is_refused_by_name() -> None:
    with pytest.raises(CannotTrain, match=r"no option 'stpes' \(did you mean 'steps'\?\); it takes size, "):
        train_job("mine.py", "dp(2)", stpes=4)


def test_what_is_neither_a_job_nor_its_name_is_refused() -> None:
    with pytest.raises(CannotTrain, match=r"given a object; give a shoal\.Job, the file that defines one"):
        train_job(object(), "dp(2)")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": 5}, "given 5 as its strategy; give text or terms"),
        ({"strategy": dp}, "as its strategy; give text or terms"),
        ({"checkpoint_every": "x"}, "checkpoint_every='x'; expected a whole number of at least 0"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1; expected a whole number"),
        ({"steps": True}, "steps=True; expected a whole number"),
        ({"trace": "yes"}, "trace='yes'; expected True or False"),
        ({"size": 3}, "size=3; expected text"),
        ({"folder": 5}, "given 5 as its folder"),
        ({"hang_after_s": "x"}, "hang_after_s is 'x'; expected seconds"),
        ({"on_message": 3}, "on_message is 3; expected a function"),
        ({"emulate": "2x2, 10us, 20GB/s | 100us, 1Gb/s"}, "are 4 ranks, and the strategy has 2"),
    ],
)
def test_a_value_of_another_kind_is_refused_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotTrain, match=words):
        train_job("mine.py", **{"strategy": "dp(2)", **given})


@pytest.mark.processes
def test_a_strategy_may_be_one_term_and_a_folder_of_runs_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="there is no file"):
        train_job(str(tmp_path / "absent.py"), dp(2))
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text("{}")
    with pytest.raises(CannotTrain, match="is where runs are kept"):
        train_job("mine.py", dp(2), folder=tmp_path / "runs")
