"""Run folders that hold something else than was written: a sentence at once, never a wait, and what is intact stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.checkpoint.files import put_in_place, remove, tidy
from shoal.checkpoint.rows import CheckpointBroken
from shoal.training.check import require_job_of
from shoal.training.options import TrainOptions
from shoal.training.record.lines import Lines, cut
from shoal.training.record.run import RunBroken, read_json, read_lines, write_json
from shoal.training.resumed import CannotTrain, job_of
from shoal.training.resumed import inherited as _inherit


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("odd", [pipe, endless, folder])
def test_what_is_no_file_is_refused_at_once(odd: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    odd(path)
    for reads in (read_json, read_lines, lambda path: cut(path, 3)):
        with pytest.raises(RunBroken, match=r"steps\.jsonl cannot be read: it is not a regular file"):
            reads(path)
    with pytest.raises(OSError, match="it is not a regular file"):
        Lines(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("odd", [pipe, endless, folder])
def test_what_lies_where_a_file_is_prepared_makes_way(odd: Callable[[Path], None], tmp_path: Path) -> None:
    odd(tmp_path / "run.json.new")
    write_json(tmp_path / "run.json", {"status": "running"})
    assert read_json(tmp_path / "run.json") == {"status": "running"}


def test_lines_that_cannot_be_understood_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"[" * 200_000 + b'\n{"step": "x"}\n{"step": 2}\n{"step": 9}\n')
    cut(path, 3)
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_links_and_files_among_checkpoints_are_removed_as_what_they_are(tmp_path: Path) -> None:
    elsewhere, among = tmp_path / "elsewhere", tmp_path / "checkpoints"
    for path in (elsewhere, among, among / "step-00000004"):
        path.mkdir()
    (elsewhere / "kept").write_text("kept")
    (among / "step-00000009.partial").symlink_to(elsewhere)
    (among / "step-00000008.partial").write_text("")
    (among / "step-00000004.replaced").symlink_to(elsewhere)
    tidy(among)
    assert [path.name for path in among.iterdir()] == ["step-00000004"]
    for odd in (lambda path: path.symlink_to(elsewhere), lambda path: path.write_text(""), lambda path: path.mkdir()):
        (among / "step-00000006.partial").mkdir()
        (among / "step-00000006.partial" / "new").write_text("")
        odd(among / "step-00000006")
        put_in_place(among / "step-00000006.partial", among / "step-00000006")
        assert (among / "step-00000006" / "new").exists()
        remove(among / "step-00000006")
    (among / "step-00000002").symlink_to(elsewhere)
    remove(among / "step-00000002")
    assert [path.name for path in among.iterdir()] == ["step-00000004"]
    assert (elsewhere / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([1], r"run\.json is not the record of a run: its arguments are \[1\]"),
        ({"strategy": 5}, r"run\.json has the strategy 5, but text was expected; .* give --strategy"),
        ({"global_batch": "8"}, "has the global_batch '8', but a whole number was expected; .* give --batch"),
        ({"steps": True}, "has the steps True"),
    ],
)
def test_settings_of_a_run_that_were_altered_are_refused_by_name(arguments: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"arguments": arguments}))
    with pytest.raises(RunBroken, match=words):
        _inherit(TrainOptions(job="mine.py"), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("metrics", [1]), ("metrics", {"acc": "x"}), ("loss", "x"), ("reached_s", {})]
)
def test_progress_of_another_form_is_refused(key: str, value: Any) -> None:
    progress = {"job": "line", "seed": 0, "counter": 8, "train_s": 1.0, "metrics": {}, key: value}
    saved: Any = SimpleNamespace(path=Path("step-00000004"), progress=progress)
    job: Any = SimpleNamespace(name="line", seed=0)
    with pytest.raises(CheckpointBroken, match="is no checkpoint of a run: its "):
        require_job_of(saved, job)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"arguments": {"job": 3}}, r"run.json has the job 3, but text was expected"),
        ({"arguments": {"job": "object:mine"}}, "the run was of a Job object of another process; give it"),
        ({"arguments": [1]}, "its arguments are"),
        (None, "no run.json there, or above it, says which job it is of"),
    ],
)
def test_a_job_that_a_run_does_not_name_is_asked_for(tmp_path: Path, record: Any, said: str) -> None:
    if record is not None:
        (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises((RunBroken, CannotTrain), match=said):
        job_of(str(tmp_path))
