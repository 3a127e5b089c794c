"""`train_job` refuses what it cannot honour before anything starts."""

from __future__ import annotations

import pytest

from shoal.train.local import CannotTrain, train_job


def test_a_misspelt_option_is_refused_by_name() -> None:
    with pytest.raises(CannotTrain, match=r"no option 'stpes' \(did you mean 'steps'\?\); it takes size, "):
        train_job("mine.py", "dp(2)", stpes=4)


def test_a_job_object_is_refused_with_the_way_out() -> None:
    with pytest.raises(CannotTrain, match="given a object; ranks are processes of their own and load the job again"):
        train_job(object(), "dp(2)")  # type: ignore[arg-type]
