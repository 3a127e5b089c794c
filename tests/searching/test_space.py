"""Spaces: names of points, what a trial may ask for, the built-in ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.job import JobError, load_job
from shoal.job.space import Dimension, FixedTrial, load_space, point, split_point
from shoal.searching.proposal import ChangesModel, centre

LINE = f"{Path(__file__).with_name('line_space.py')}:space"
VALUES = {"lr": 0.1, "momentum": 0.5, "hidden": 4, "between": "relu"}


def test_a_point_is_read_back_from_its_name():
    values = {"a": 1, "b": 0.1, "c": "conv3", "d": "1", "e": True, "f": None, "g": "a/b:c?d&e=f %", "h": 1e-30}
    assert split_point(point("some/file.py:space", values)) == ("some/file.py:space", values)


def test_a_point_is_a_job_like_any_other():
    model = load_job(point(LINE, VALUES)).model()
    assert [type(each).__name__ for each in model] == ["Linear", "ReLU", "Linear"]
    assert model[0].out_features == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 9}, "hidden=9 is not in the space, which takes a whole number from 2 to 8"),
        ({"hidden": 2.5}, "hidden=2.5"),
        ({"between": "gelu"}, "one of 'tanh', 'relu'"),
        ({"momentun": 0.1}, "has no 'momentun' (did you mean 'momentum'?)"),
    ],
)
def test_values_outside_of_the_space_are_refused(change, message):
    with pytest.raises(JobError) as error:
        load_job(point(LINE, {**VALUES, **change})).model()
    assert message in str(error.value)


def test_a_missing_value_is_named():
    with pytest.raises(JobError, match=r"has no lr; add lr=..., a number from 0.001 to 1"):
        load_job(point(LINE, {"hidden": 4}))


def test_a_dimension_knows_its_values():
    steps = Dimension(name="a", low=4, high=16, step=4, whole=True)
    assert [each for each in range(1, 20) if steps.contains(each)] == [4, 8, 12, 16]
    assert not steps.contains(True)
    assert Dimension(name="a", choices=(1, "1")).contains("1")
    assert not Dimension(name="a", choices=(1,)).contains(True)
    with pytest.raises(JobError, match="above 0"):
        Dimension(name="a", low=0.0, high=1.0, log=True)
    with pytest.raises(JobError, match="is a list"):
        Dimension(name="a", choices=([1],))


@pytest.mark.parametrize("name", ["image", "language", "image:small", "language:small"])
def test_built_in_spaces_make_jobs(name):
    job, dimensions = centre(load_space(name))
    again = load_space(name)(FixedTrial({key: each.centre for key, each in dimensions.items()}))
    assert sum(each.numel() for each in again.model().parameters()) > 0
    assert job.name == again.name
    assert {"lr", "weight_decay", "warmup"} < set(dimensions)


def test_which_values_change_the_model():
    changes = ChangesModel(load_space(LINE))
    assert changes(VALUES, "hidden", 5)
    assert not changes(VALUES, "lr", 0.2)
    assert not changes(VALUES, "between", "tanh")
