"""`shoal explain JOB`: the layout of a model for people and as JSON, and which texts are jobs at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.command import Place
from cli.conftest import Shoal
from shoal.api.explain import names_a_job

JOB = """
import torch
from torch import nn
from shoal.job import Job, LayoutHints, TensorData, cross_entropy

class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Embedding(12, 8)
        self.steps = nn.ModuleList(Step() for _ in range(6))
        self.leave = nn.Linear(8, 12, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        x = self.enter(x)
        kept = torch.tanh(x)
        for number, step in enumerate(self.steps):
            x = step(x)
            if number == 2:
                x = x + kept
        return self.leave(x)

x = torch.arange(160).reshape(40, 4) % 12
job = Job(
    name="steps", model=Model, train=TensorData(x=x, y=x), loss=cross_entropy,
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1), global_batch=8, steps=1, layout=LAYOUT,
)
"""


@pytest.fixture
def steps(tmp_path: Path) -> str:
    (tmp_path / "steps.py").write_text(JOB.replace("LAYOUT", "None"), encoding="utf-8")
    return "steps.py"


def told(shoal: Shoal, *words: str) -> dict[str, Any]:
    done = shoal("explain", *words, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert isinstance(found, dict)
    return found


def test_a_job_is_told_from_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("")
    for job in ("language", "language:tiny", " Image:resnet", "model.py", "gone.py", "model.py:other", "langage:tiny"):
        assert names_a_job(job), job
    for strategy in (
        "dp(2)",
        "serial",
        "dp",
        "dp(2) / tp(2)",
        "language(2)",
        "",
        "qp(3)",
        "pp(4",
        "x" * 999,
        "\0",
        ".",
    ):
        assert not names_a_job(strategy), strategy


def test_the_layout_is_one_object(steps: str, shoal: Shoal) -> None:
    found = told(shoal, steps)
    assert (found["job"], found["model"], found["parameters"]) == ("steps", "Model", 12 * 8 + 6 * (2 * 8 * 32 + 40))
    assert [group["first"] for group in found["prefix"]] == ["enter"]
    [group] = found["blocks"]
    assert (group["first"], group["last"], group["count"]) == ("steps.0", "steps.5", 6)
    assert [group["first"] for group in found["suffix"]] == ["leave"]
    assert sum(piece["cost_share"] for piece in found["pieces"]) == pytest.approx(1.0)
    # What is kept beside the blocks is nobody's argument or result until it has been added.
    assert set(found["no_cut_before"]) == {"steps.0", "steps.1", "steps.2"}
    by_path = {piece["path"]: piece for piece in found["pieces"]}
    assert by_path["steps.4"]["crossing_bytes"] == 4 * 8 * 4
    assert by_path["steps.4"]["crossing"] == [[4, 8]]
    assert by_path["steps.1"]["crossing_bytes"] is None
    assert found["tied"] == [{"parameter": "enter.weight", "read_by": ["enter", "leave"]}]
    for num, rows in found["stages"].items():
        assert len(rows) == int(num)
        assert sum(row["pieces"] for row in rows) == len(found["pieces"])
        assert sum(row["cost_share"] for row in rows) == pytest.approx(1.0)
    assert len(found["tensor"]["regions"]) == 6
    assert found["tensor"]["regions"][0] == {
        "kind": "features",
        "parts": 32,
        "columns": ["steps.0.up"],
        "rows": ["steps.0.down"],
    }
    assert found["sequence"]["may_be_cut"] is False
    assert "attention" in found["sequence"]["why_not"]
    assert found["experts"]["layers"] == []


def test_people_get_it_in_a_hundred_columns(steps: str, shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = shoal("explain", steps)
    assert done.status == 0, done.err
    shown = done.out.splitlines()
    assert max(map(len, shown)) <= 100
    text = " ".join(" ".join(shown).split())
    for words in (
        "steps.0 .. 5: 6 like blocks",
        "a pipeline can be cut at 4 of 7 places",
        "128 B a sample",
        "no cut before steps.0, steps.1, steps.2: it needs more than its arguments",
        "tied: enter.weight is read by enter and leave",
        "2 stages: enter .. ",
        "4 stages: enter .. ",
        "steps.*: features in 32 parts: up -> down (6 times)",
        "vocabulary of 12: enter, leave",
        "stays unsharded: no attention was found",
    ):
        assert words in text, words


def test_the_built_in_language_model_may_be_cut_every_way(shoal: Shoal) -> None:
    found = told(shoal, "language", "--size", "tiny")
    assert found["job"] == "language:gpt:tiny"
    assert found["no_cut_before"] == {}
    assert found["tensor"]["vocabulary"]["words"] == 256
    assert found["tensor"]["vocabulary"]["loss_stays_cut"] is True
    assert {region["kind"] for region in found["tensor"]["regions"]} == {"heads", "features"}
    sequence = found["sequence"]
    assert (sequence["may_be_cut"], sequence["length"], sequence["causal"]) == (True, 32, True)
    assert (sequence["loss_stays_cut"], sequence["loss_reads"]) == (True, ["y"])


def test_with_a_strategy_it_says_whether_the_job_can_be_trained_by_it(steps: str, shoal: Shoal) -> None:
    found = told(shoal, steps, "--strategy", "pp(2, 'interleaved', micro=2, chunks=2)")["strategy"]
    assert found["legal"]
    assert [row["rank"] for row in found["stages"]] == [0, 1, 0, 1]
    assert [found["stages"][0]["first"], found["stages"][-1]["last"]] == ["enter", "leave"]
    found = told(shoal, steps, "-s", "tp(3)")["strategy"]
    assert not found["legal"]
    assert "do not divide by 3" in found["refusals"][0]["reason"]
    assert found["refusals"][0]["nearest"]
    done = shoal("explain", steps, "-s", "dp(2) * tp(2)", "--ranks", "8")
    assert done.status == 0
    assert "no: " in done.out
    done = shoal("explain", steps, "-s", "pp(8)")
    assert "needs more than its arguments" in done.out


def test_what_the_job_declares_is_shown_and_obeyed(tmp_path: Path, shoal: Shoal) -> None:
    declared = "LayoutHints(stages=('steps.4',), roles={'steps.0.*': 'whole'}, experts=False)"
    (tmp_path / "steps.py").write_text(JOB.replace("LAYOUT", declared))
    found = told(shoal, "steps.py")
    assert found["declared"] == {"roles": {"steps.0.*": "whole"}, "stages": ["steps.4"], "experts": False}
    [(num, rows)] = found["stages"].items()
    assert (num, rows[1]["first"]) == ("2", "steps.4")
    assert len(found["tensor"]["regions"]) == 5
    assert "declared by the job: stages = ['steps.4']" in shoal("explain", "steps.py").out


def test_what_a_job_prints_does_not_get_into_the_json(tmp_path: Path, place: Place) -> None:
    (tmp_path / "loud.py").write_text("print('a word')\n" + JOB.replace("LAYOUT", "None"), encoding="utf-8")
    done = place.shoal("explain", "loud.py", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"] == "steps"
    assert "a word" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("langage:tiny",), "unknown job 'langage'"),
        (("language:huge",), "unknown job 'huge'"),
        (("gone.py",), "there is no file gone.py"),
        (("language", "--timeline"), "--timeline draws a strategy, but 'language' is a job"),
        (("language", "--ranks", "2"), "add --strategy"),
        (("dp(2)", "--strategy", "tp(2)"), "--strategy tp(2): it goes with a job, but 'dp(2)' names none"),
        (("dp(2)", "--size", "tiny"), "--size tiny: it goes with a job"),
        (("language", "--strategy", "tq(2)"), "tq"),
        (("dq(2)",), "dq"),
    ],
)
def test_what_cannot_be_explained_is_told_in_a_sentence(words: tuple[str, ...], reason: str, shoal: Shoal) -> None:
    done = shoal("explain", *words)
    assert done.status == 2
    assert reason in done.err
    assert "Traceback" not in done.err
