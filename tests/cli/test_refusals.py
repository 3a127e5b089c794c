"""Bad input: every refusal is a sentence that says what was given and what to do, and the exit status is 2."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from cli.conftest import Shoal
from cli.jobs import write_job

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("dq(2)", ["there is no term dq. Did you mean dp?", "  dq(2)\n  ^^"]),
        ("dp(2, zeros=1)", ["dp has no argument zeros", "Did you mean zero?", "  dp(2, zeros=1)\n        ^"]),
        ("dp(2, zero=4)", ["zero", "4"]),
        ("dp('two')", ["dp"]),
        ("dp(2", ["closing parenthesis missing"]),
        ("", ["shoal: "]),
        ("__import__('os').system('true')", ["shoal: "]),
        ("dp(2) * dp(2, sync=local(4))", ["shoal: "]),
        ("spatial(2)", ["has no image planes to cut"]),
        ("dp(2, via=ps(1), compress=powersgd(2))", ["made by all ranks together"]),
        ("dp(5)", ["dp(5): a global batch of 24 does not divide by five replicas", "nearest legal: dp(4), dp(6)"]),
        ("dp(2) * accumulate(5)", ["24", "nearest legal: "]),
    ],
)
def test_a_strategy_that_cannot_be_trained_is_explained(strategy: str, expected: list[str], shoal: Shoal) -> None:
    done = shoal("train", "language:tiny", "--strategy", strategy)
    assert done.status == 2
    assert done.err.startswith("shoal: ")
    assert [words for words in expected if words not in done.err] == []
    assert "Traceback" not in done.err
    assert not Path("runs").exists()


def test_more_ranks_than_the_strategy_needs_are_refused(shoal: Shoal) -> None:
    done = shoal("train", "language:tiny", "--strategy", "dp(2)", "--ranks", "4")
    assert (done.status, done.err) == (
        2,
        "shoal: dp(2): the strategy needs 2 ranks, 4 were given; nearest legal: dp(4)\n",
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--steps", "-3"),
        ("--steps", "many"),
        ("--batch", "0"),
        ("--batch", "-24"),
        ("--seed", "-1"),
        ("--ranks", "0"),
        ("--checkpoint-every", "-1"),
        ("--hang-after", "0"),
        ("--backend", "smoke"),
        ("--size", "huge"),
        ("--nonsense", "1"),
    ],
)
def test_an_option_out_of_range_is_named(option: str, value: str, shoal: Shoal) -> None:
    done = shoal("train", "language", "--strategy", "dp(2)", option, value)
    assert done.status == 2
    assert done.err.startswith("shoal: ")
    assert option.strip("-") in done.err
    assert not Path("runs").exists()


def test_a_folder_that_is_no_run_is_not_taken_for_a_strategy(shoal: Shoal) -> None:
    Path("empty").mkdir()
    for verb in ("explain", "export"):
        done = shoal(verb, "empty")
        assert done.status == 2
        assert "shoal: empty" in done.err
        assert "run.json" in done.err
        assert done.err.count("\n") == 1


def test_a_config_file_is_answered_with_the_names_of_options(shoal: Shoal) -> None:
    Path("bad.toml").write_text('strateegy = "dp(2)"\n')
    done = shoal("train", "language:tiny", "--config", "bad.toml")
    assert done.status == 2
    assert "no option 'strateegy' (did you mean 'strategy'?)" in done.err
    assert "json" in done.err
    assert "as_json" not in done.err


def test_two_sizes_are_one_too_many(shoal: Shoal) -> None:
    done = shoal("train", "language:tiny", "--size", "small")
    assert done.status == 2
    assert "--size small: the job 'language:tiny' is of size tiny; keep one of the two" in done.err


def test_a_job_file_that_is_not_there_is_named(shoal: Shoal) -> None:
    Path("lines.py").write_text("")
    done = shoal("train", "line.py")
    assert done.status == 2
    assert "there is no file line.py. Did you mean" in done.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nraise RuntimeError('no ünicorns')", ["job.py:2", "RuntimeError: no ünicorns"]),
        ("def job(:", ["job.py:1", "SyntaxError"]),
        ("import sys\nsys.exit(0)", ["job.py:2", "SystemExit"]),
        ("", ["does not define 'job'"]),
        ("job = 3", ["is a int, but must be a Job"]),
    ],
)
def test_a_job_file_that_fails_is_told_with_its_line(text: str, expected: list[str], shoal: Shoal) -> None:
    Path("job.py").write_text(text, encoding="utf-8")
    done = shoal("train", "job.py", "--strategy", "dp(2)")
    assert done.status == 2
    assert [words for words in expected if words not in done.err] == []
    assert "Traceback" not in done.err
    assert not Path("runs").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(shoal: Shoal, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert shoal("train", job, "--steps", "2", "--folder", "one").status == 0
    assert shoal("train", job, "--steps", "2", "--folder", "two").status == 0
    before = (tmp_path / "one" / "run.json").read_bytes()
    done = shoal("train", job, "--steps", "2", "--folder", "one")
    assert done.status == 2
    assert "--folder one holds a run already; resume it (--resume one), or give another folder" in done.err
    done = shoal("train", job, "--steps", "3", "--resume", "two", "--folder", "one")
    assert done.status == 2
    assert "--folder one holds a run already" in done.err
    assert (tmp_path / "one" / "run.json").read_bytes() == before


def test_a_folder_that_cannot_be_made_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = shoal("train", write_job(tmp_path), "--folder", "file/run")
    assert done.status == 2
    assert "shoal: file/run cannot be the run's folder: Not a directory; give another --folder" in done.err


def test_options_of_a_file_count_where_the_command_line_has_none(shoal: Shoal, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    lines = [f'job = "{job}"', "steps = 3", "checkpoint-every = 1", 'folder = "run"', "[set]", "clip = 0.5"]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    done = shoal("train", "--config", "own.toml", "--steps", "2")
    assert done.status == 0, done.err
    given = json.loads((tmp_path / "run" / "run.json").read_text())["arguments"]
    found = {name: given[name] for name in ("job", "steps", "checkpoint_every", "set")}
    assert found == {"job": job, "steps": 2, "checkpoint_every": 1, "set": {"clip": 0.5}}
    (tmp_path / "own.toml").write_text("stesp = 3\n")
    done = shoal("train", job, "--config", "own.toml")
    assert done.status == 2
    assert "--config own.toml: no option 'stesp' (did you mean 'steps'?)" in done.err
    done = shoal("train")
    assert done.status == 2
    assert "give a Python file that defines a job, or --resume RUN" in done.err


def test_resuming_from_nowhere_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    done = shoal("train", write_job(tmp_path), "--resume", "nowhere")
    assert done.status == 2
    assert "--resume nowhere: there is no such folder" in done.err


def test_resuming_a_run_without_checkpoints_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert shoal("train", job, "--steps", "2", "--folder", "run", "--checkpoint-every", "0").status == 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    done = shoal("train", job, "--resume", "run")
    assert done.status == 2
    assert "--resume run: there is no intact checkpoint in run/checkpoints; start anew without --resume" in done.err


def test_resuming_another_job_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    assert shoal("train", write_job(tmp_path), "--steps", "2", "--folder", "run").status == 0
    done = shoal("train", write_job(tmp_path, name="circle"), "--resume", "run")
    assert done.status == 2
    assert "is of job 'line' with seed 0, but this is job 'circle'" in done.err
    done = shoal("train", "line.py", "--resume", "run", "--seed", "7")
    assert done.status == 2
    assert "but this is job 'line' with seed 7" in done.err


def damage_by_cutting(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_by_one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"), [(damage_by_cutting, "is truncated"), (damage_by_one_bit, "has been altered")]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_and_refused_by_name(
    damage: object, words: str, shoal: Shoal, tmp_path: Path
) -> None:
    job, run = write_job(tmp_path), tmp_path / "run"
    assert shoal("train", job, "-s", "dp(2)", "--folder", "run", "--checkpoint-every", "4").status == 0
    undisturbed = (run / "steps.jsonl").read_text().splitlines()
    newest, older = run / "checkpoints" / "step-00000012", run / "checkpoints" / "step-00000008"
    assert newest.is_dir()
    assert older.is_dir()
    damage(newest / "rank-00001.safetensors")  # type: ignore[operator]

    done = shoal("train", job, "--resume", str(newest))
    assert done.status == 2
    assert words in done.err

    done = shoal("train", job, "--resume", "run")
    assert done.status == 0
    assert f"warning: checkpoint {newest.relative_to(tmp_path)} is passed over" in done.err
    assert words in done.err
    again = (run / "steps.jsonl").read_text().splitlines()
    assert [line.split('"count"')[0] for line in again] == [line.split('"count"')[0] for line in undisturbed]


def test_when_every_checkpoint_is_damaged_nothing_is_resumed(shoal: Shoal, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert shoal("train", job, "--folder", "run", "--checkpoint-every", "4").status == 0
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        damage_by_cutting(checkpoint / "checkpoint.json")
    done = shoal("train", job, "--resume", "run")
    assert done.status == 2
    assert done.err.count("is passed over") == 2
    assert "there is no intact checkpoint" in done.err
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert shoal("train", job, "--resume", "run").status == 2


def test_a_port_in_use_is_told_before_a_script_starts(shoal: Shoal, tmp_path: Path) -> None:
    Path("script.py").write_text("open('started', 'w')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = shoal("launch", "--port", str(port), "script.py")
    assert done.status == 2
    assert f"shoal: port {port} is in use by another program on this host." in done.err
    assert not Path("started").exists()


@pytest.mark.parametrize(
    ("variable", "words"), [("3", "the strategy needs 2 ranks, 3 were given"), ("x", "WORLD_SIZE is 'x'")]
)
def test_a_launcher_of_another_size_is_refused_by_one_voice(
    variable: str, words: str, shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", variable)
    for rank, heard in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        done = shoal("train", "language:tiny", "--strategy", "dp(2)")
        assert done.status == 2
        assert done.err.count(words) == heard
