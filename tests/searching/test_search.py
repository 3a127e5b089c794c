"""Searches with workers that train: a killed worker, a stop, a resume; what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.artifacts import get_all_artifact_meta
from safetensors.torch import load_file

import shoal
from shoal.api.search import CannotSearch
from shoal.job.space import split_point
from shoal.training.record.run import read_lines

SPACE = str(Path(__file__).with_name("line_space.py"))
TRIALS = 4
WANTED = {"method": "evolution", "trials": TRIALS, "population": 2, "devices": 1, "strategy": "serial", "seed": 3}


def signature(found: shoal.Search) -> list:
    return [(row["trial"], row["params"], row["value"]) for row in found.trials]


class Killer:
    """Kills the worker in its third trial, and stops the search in its fourth."""

    def __init__(self) -> None:
        self.worker, self.begun, self.lost = 0, 0, 0

    def __call__(self, message: dict) -> None:
        if message["event"] == "worker":
            self.worker = int(message["worker"].split(":")[1])
        self.lost += message["event"] == "lost"
        if message["event"] == "begin":
            self.begun += 1
            if self.begun == 3:
                os.kill(self.worker, signal.SIGKILL)
            if self.begun == 5:
                raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_search_that_was_disturbed_finds_what_an_undisturbed_one_finds(tmp_path):
    calm = shoal.search(SPACE, folder=tmp_path / "calm", **WANTED)
    killer = Killer()
    with pytest.raises(KeyboardInterrupt):
        shoal.search(SPACE, folder=tmp_path / "disturbed", progress=killer, **WANTED)
    assert killer.lost == 1
    disturbed = shoal.search(SPACE, folder=tmp_path / "disturbed", **WANTED)
    assert len(disturbed.trials) == TRIALS
    assert signature(disturbed) == signature(calm)
    assert disturbed.results["lost"] == 2
    assert disturbed.best == min(disturbed.trials, key=lambda row: row["value"])
    # At most one trial's progress was lost: those that had ended were not trained again.
    steps = [len(read_lines(path)) for path in sorted((tmp_path / "disturbed" / "trials").glob("*/steps.jsonl"))]
    assert steps[:2] == [16, 16]
    winner = disturbed.winner
    assert winner is not None
    assert winner.summary["metrics"]["loss"] == disturbed.best["value"]
    model = winner.model()
    assert split_point(disturbed.best["job"])[1] == disturbed.best["params"]
    assert model[0].out_features == disturbed.best["params"]["hidden"]
    weights = load_file(disturbed.results["winner"]["weights"])
    assert {name: value.tolist() for name, value in weights.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    url = f"sqlite:///{tmp_path / 'disturbed' / 'study.sqlite'}"
    study = optuna.load_study(study_name="disturbed", storage=url)  # As the dashboard does.
    [artifact] = get_all_artifact_meta(study)
    assert (tmp_path / "disturbed" / "artifacts" / artifact.artifact_id).stat().st_size > 0
    more = shoal.search(SPACE, folder=tmp_path / "disturbed", **{**WANTED, "trials": TRIALS + 1})
    assert signature(more)[:TRIALS] == signature(calm)
    assert more.winner is not None


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (SPACE, {"method": "tpa"}, "method=tpa: expected random, tpe"),
        (SPACE, {"trials": 0}, "trials=0: expected at least 1"),
        (f"{SPACE}:nothing", {}, "nothing varies in the space"),
        (SPACE, {"metric": "speed"}, "is higher or lower better"),
        (SPACE, {"strategy": "dp(4)", "devices": 2}, "needs 4 devices"),
        (SPACE, {"strategy": "dp(2, zero=3)", "devices": 2, "method": "darts"}, "use zero=2"),
        (lambda trial: None, {}, "defined at the top level of a file"),
        ("image:resnet50", {}, "has the sizes tiny, small"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path, space, options, message):
    with pytest.raises(ValueError) as error:
        shoal.search(space, folder=tmp_path / "s", **options)
    assert message in str(error.value)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CannotSearch, match="holds something else"):
        shoal.search(SPACE, folder=tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_one_shot_search_trains_all_candidates_and_then_the_chosen(tmp_path):
    found = shoal.search(SPACE, method="darts", trials=1, devices=2, strategy="dp(2)", folder=tmp_path / "s")
    [row] = found.trials
    shares = row["shares"]["between"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert row["params"]["between"] == max(shares, key=shares.__getitem__)
    assert row["params"]["hidden"] == 5
    assert len(read_lines(tmp_path / "s" / "trials" / "0000" / "one-shot" / "steps.jsonl")) == 16
    assert found.winner is not None
    with pytest.raises(CannotSearch, match="chooses modules, and the space has none"):
        shoal.search(f"{SPACE}:plain", method="darts", trials=1, strategy="serial", folder=tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_command_searches_and_resumes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "shoal",
        "search",
        SPACE,
        "-m",
        "pbt",
        "--rounds",
        "2",
        "-n",
        "2",
        "-s",
        "serial",
        "--folder",
        str(tmp_path / "s"),
    ]
    first = subprocess.run([*command, "--trials", "3"], capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "6 finished of 6, by pbt" in first.stdout
    refused = subprocess.run([*command, "--trials", "3", "--seed", "1"], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "has seed 0" in refused.stderr
