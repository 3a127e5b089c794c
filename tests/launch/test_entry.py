"""What ranks are started with: functions by name, and options that survive the way to them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from shoal.launch.start import name_of
from shoal.proof.options import ProofOptions
from shoal.runtime.options import KINDS, JobOptions, WrongOption
from shoal.training.entry import check_run, train_run
from shoal.training.options import TrainOptions


def test_a_function_is_named_so_that_another_process_finds_it() -> None:
    assert name_of(train_run) == "shoal.training.entry:train_run"


def test_a_function_that_no_module_has_under_its_name_is_refused() -> None:
    def inner(arguments: dict[str, Any], channel: Any) -> None:
        pass

    for target in (inner, lambda arguments, channel: None):
        with pytest.raises(ValueError, match="they import it by its name, and no module has it"):
            name_of(target)


@pytest.mark.processes
def test_the_process_that_starts_ranks_loads_no_torch() -> None:
    rooms = "shoal.cli.train, shoal.cli.verify, shoal.training.local, shoal.proof"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(job="mine.py", strategy="dp(2)", steps=3, trace=True, lock="x", checked=True),
        ProofOptions(job="mine.py", strategy="dp(2)", num_steps=3, exact=False),
    ],
)
def test_options_reach_ranks_as_they_were_given(options: JobOptions) -> None:
    assert type(options).from_json(options.to_json()) == options
    assert options.of_job == JobOptions(job="mine.py", steps=options.steps)


def test_the_record_keeps_what_a_user_gives_and_nothing_of_the_run_itself() -> None:
    options = TrainOptions(job="mine.py", lock="secret", checked=True)
    assert set(options.to_json()) - set(options.recorded()) == {
        "lock",
        "checked",
        "flops_per_sample",
        "restored",
        "job_seed",
        "teachers",
    }


def test_a_wrong_name_and_a_wrong_value_are_refused_also_on_the_way_to_ranks() -> None:
    with pytest.raises(WrongOption, match=r"no option 'stpes' \(did you mean 'steps'\?\); it takes size, "):
        check_run({"job": "mine.py", "stpes": 3}, None)
    with pytest.raises(WrongOption, match="steps='3'; expected a whole number of at least 0"):
        train_run({"job": "mine.py", "steps": "3"}, None)
    with pytest.raises(WrongOption, match="job=None; expected text"):
        TrainOptions(job=None)  # type: ignore[arg-type]


def test_every_option_says_what_it_takes() -> None:
    for each in (*fields(TrainOptions), *fields(ProofOptions)):
        assert str(each.type).removesuffix(" | None") in KINDS, each.name
