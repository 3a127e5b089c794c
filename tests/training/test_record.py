"""The record of a run: strict JSON at every moment, cut back on resume, and no reason for a run to fail."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.comm.ledger import Entry, Key, Ledger
from shoal.estimate.estimate import Estimate
from shoal.training.record.recorder import Recorder, Run, RunBroken, new_folder, read_run, tracing

SENT = Ledger({Key("dp", "gradient", "all_reduce"): Entry(2, 4, 1000)})


def recorder(folder: Path, **options: Any) -> Recorder:
    given = {
        "job_name": "language",
        "strategy": "dp(2, zero=1)",
        "world": 2,
        "seed": 7,
        "arguments": {"size": "tiny"},
    }
    return Recorder(folder, **{**given, **options})


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.0 / step,
        "step_s": 0.1 * step,
        "samples_per_s": 10.0,
        "memory_bytes": 100 + step,
        **more,
    }


def strict(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def lines(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.processes
def test_a_finished_run_reads_back_as_it_was_recorded(tmp_path: Path) -> None:
    record = recorder(tmp_path / "run")
    for step in (1, 2, 3, 4):
        record.step(row(step), SENT)
    record.metrics(4, {"loss": 0.5, "perplexity": math.exp(0.5)})
    record.close("finished", {"steps_to_target": 4, "time_to_target_s": 1.0, "predicted": SENT.to_json()})
    run = read_run(tmp_path / "run")
    assert (run.status, run.reason, run.job, run.strategy, run.world) == (
        "finished",
        None,
        "language",
        "dp(2, zero=1)",
        2,
    )
    assert (run.seed, run.contract, run.arguments) == (7, "exact", {"size": "tiny"})
    assert run.losses == [1.0, 0.5, 1 / 3, 0.25]
    assert run.step_s == pytest.approx(0.3)  # the median without the first
    assert run.summary["mean_step_s"] == pytest.approx(0.3)
    assert run.summary["loss"] == 0.25
    assert run.summary["metrics"] == {"loss": 0.5, "perplexity": math.exp(0.5)}
    assert run.memory_bytes == 104
    assert (run.steps_to_target, run.time_to_target_s) == (4, 1.0)
    assert run.ledger == run.predicted_ledger == SENT
    assert run.ledger_of_run == SENT + SENT + SENT + SENT
    assert run.validation == ({"step": 4, "metrics": {"loss": 0.5, "perplexity": math.exp(0.5)}},)
    assert run.environment["torch"] == torch.__version__
    assert run.started <= (run.ended or "")


def test_a_run_has_every_field_of_an_estimate() -> None:
    assert {f.name for f in dataclasses.fields(Estimate)} <= {f.name for f in dataclasses.fields(Run)}


def test_a_run_that_is_under_way_or_was_killed_can_be_read(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.step(row(1))
    record.step(row(2))
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b'{"step": 3, "lo')
    run = read_run(tmp_path)
    assert run.status == "running"
    assert [entry["step"] for entry in run.steps] == [1, 2]
    assert run.step_s == pytest.approx(0.2)
    assert run.memory_bytes == 102
    assert run.ended is None


def test_every_line_is_on_disk_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    for step in (1, 2, 3):
        record.step(row(step))
        assert len(lines(tmp_path / "steps.jsonl")) == step


def test_numbers_that_json_lacks_become_null_everywhere(tmp_path: Path) -> None:
    record = recorder(tmp_path, arguments={"path": Path("a/b"), "limit": math.inf, "größe": {1: (2, -math.inf)}})
    record.step(row(1, loss=math.nan, grad_norm=-math.inf, lr=np.float32(0.5), count=torch.tensor(3)))
    record.metrics(1, {"loss": math.nan, "perplexity": math.inf})
    record.close("failed", {"reason": "step 2: the loss is nan 🐟", "loss": math.nan})
    assert lines(tmp_path / "steps.jsonl") == [
        {
            "step": 1,
            "loss": None,
            "step_s": 0.1,
            "samples_per_s": 10.0,
            "memory_bytes": 101,
            "grad_norm": None,
            "lr": 0.5,
            "count": 3,
        }
    ]
    assert lines(tmp_path / "validation.jsonl") == [{"step": 1, "metrics": {"loss": None, "perplexity": None}}]
    facts = strict(tmp_path / "run.json")
    assert facts["arguments"] == {"path": "a/b", "limit": None, "größe": {"1": [2, None]}}
    assert (facts["status"], facts["reason"]) == ("failed", "step 2: the loss is nan 🐟")
    strict(tmp_path / "ledger.json")
    run = read_run(tmp_path)
    assert math.isnan(run.losses[0])
    assert run.summary["loss"] is None


def test_a_resumed_run_forgets_what_lay_beyond_its_checkpoint(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    for step in range(1, 8):
        record.step(row(step))
        record.metrics(step, {"accuracy": step / 10})
    started = strict(tmp_path / "run.json")["started"]
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b'{"step": 8, "loss"')
    again = recorder(tmp_path, strategy="dp(4)", world=4, resumed_at=5)
    assert [entry["step"] for entry in lines(tmp_path / "steps.jsonl")] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in lines(tmp_path / "validation.jsonl")] == [1, 2, 3, 4, 5]
    again.step(row(6, loss=42.0))
    again.close("stopped")
    run = read_run(tmp_path)
    assert [entry["step"] for entry in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.losses[-1] == 42.0
    assert (run.status, run.strategy, run.started) == ("stopped", "dp(4)", started)
    assert run.summary["metrics"] == {"accuracy": 0.5}
    assert strict(tmp_path / "run.json")["resumed"][0]["step"] == 5


def test_resume_cuts_a_torn_line_even_when_no_step_is_lost(tmp_path: Path) -> None:
    recorder(tmp_path).step(row(1))
    whole = (tmp_path / "steps.jsonl").read_bytes()
    for torn in (b'{"step": 2', b'{"step": 2, "loss": 1.0}', b"\0\0\0\0", b'{"step": 2}\n\xff\n'):
        (tmp_path / "steps.jsonl").write_bytes(whole + torn)
        recorder(tmp_path, resumed_at=1)
        assert (tmp_path / "steps.jsonl").read_bytes() == whole


def test_a_run_can_resume_into_a_folder_of_its_own(tmp_path: Path) -> None:
    record = recorder(tmp_path / "new", resumed_at=100)
    record.step(row(101))
    record.close("finished")
    assert [entry["step"] for entry in read_run(tmp_path / "new").steps] == [101]


def test_a_new_run_does_not_write_over_another(tmp_path: Path) -> None:
    recorder(tmp_path).step(row(1))
    with pytest.raises(RunBroken, match="holds a run already; resume it, or give another folder"):
        recorder(tmp_path)
    assert len(lines(tmp_path / "steps.jsonl")) == 1


def test_a_second_close_changes_nothing(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.close("failed", {"reason": "first"})
    record.close("finished", {})
    assert read_run(tmp_path).reason == "first"


def test_a_run_without_a_step_has_a_record(tmp_path: Path) -> None:
    recorder(tmp_path).close("stopped")
    run = read_run(tmp_path)
    assert (run.step_s, run.memory_bytes, run.steps, run.summary["step"]) == (None, None, (), 0)


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunBroken, match=r"run\.json does not exist: .* is not the folder of a run"):
        read_run(tmp_path)
    for text in ("{", "[]", "{}", '{"strategy": "dp(2)", "world": 2, "status": []}', "\x00"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunBroken, match=r"run\.json"):
            read_run(tmp_path)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.step(row(1))
    with open(tmp_path / "steps.jsonl", "ab") as file:
        file.write(b'{"step": 2, "lo{"step": 3}\n')
    with pytest.raises(RunBroken, match=r"steps\.jsonl, line 2: not a JSON object"):
        read_run(tmp_path)


def test_run_json_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorder(tmp_path)
    before = (tmp_path / "run.json").read_text()

    def crash(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.training.record.run.os.fsync", crash)
    with pytest.warns(UserWarning, match="is not complete"):
        record.close("finished")
    assert (tmp_path / "run.json").read_text() == before
    assert not list(tmp_path.glob("*.new"))


class FullDisk:
    """A file that takes so many bytes and then no more, until there is room again."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()


def test_lines_wait_out_a_full_disk_and_none_is_torn(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.step(row(1))
    disk = FullDisk(record._steps._file, room=30)
    record._steps._file = disk
    with pytest.warns(UserWarning, match=r"steps\.jsonl cannot be written now \(No space left on device\)"):
        record.step(row(2))
    assert [entry["step"] for entry in lines(tmp_path / "steps.jsonl")] == [1]
    record.step(row(3))  # warned once
    disk.room = 10**6
    record.step(row(4))
    assert [entry["step"] for entry in lines(tmp_path / "steps.jsonl")] == [1, 2, 3, 4]
    record.close("finished")
    assert len(read_run(tmp_path).steps) == 4


def test_tensorboard_sees_the_curves_and_a_resume_starts_them_anew(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    record.step(row(1, lr=0.5, grad_norm=math.nan))
    record.metrics(1, {"accuracy": 0.75})
    record.close("stopped")
    events = read_events(tmp_path / "events")
    assert ("training/loss", 1, 1.0) in events
    assert ("training/lr", 1, 0.5) in events
    assert ("speed/step_s", 1, pytest.approx(0.1)) in events
    assert ("validation/accuracy", 1, 0.75) in events
    assert not [name for name, _, _ in events if "grad_norm" in name]  # not a number: no point on a curve
    recorder(tmp_path, resumed_at=1).close("finished")
    assert ("session start", 2, None) in read_events(tmp_path / "events")


def read_events(folder: Path) -> list[tuple[str, int, float | None]]:
    from tensorboardX.proto import event_pb2

    found: list[tuple[str, int, float | None]] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                found.append(("session start", event.step, None))
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_recording_leaves_no_thread_and_no_open_file(tmp_path: Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    record = recorder(tmp_path)
    record.step(row(1))
    record.close("finished")
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_every_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    names = [
        new_folder(tmp_path / "runs", name).name for name in ("image", "image", "../größe: 1/2", "jobs/mine.py", "///")
    ]
    assert [name[11:] for name in names] == ["image-1", "image-2", "größe-1-2-1", "mine-1", "job-1"]
    assert all((tmp_path / "runs" / name).is_dir() for name in names)


@pytest.mark.processes
def test_reading_a_run_needs_no_torch(tmp_path: Path) -> None:
    recorder(tmp_path).close("finished")
    code = (
        "import sys; from pathlib import Path; from shoal.training.record.run import read_run; "
        "print(read_run(Path(sys.argv[1])).status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["finished", "False"]


def traced_steps(folder: Path, length: int, **options: int) -> set[str]:
    """Which of the steps left their mark in the trace."""
    with tracing(folder, **options) as trace:
        for step in range(1, length + 1):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(4).sum()
            trace.step()
    events = strict(folder / "trace.json")["traceEvents"]
    return {
        event["name"] for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("step")
    }


def test_a_trace_holds_the_steps_asked_for(tmp_path: Path) -> None:
    assert traced_steps(tmp_path, 6, first_step=3, steps=2) == {"step 3", "step 4"}


def test_a_trace_of_a_shorter_run_holds_what_there_was(tmp_path: Path) -> None:
    assert traced_steps(tmp_path, 3, first_step=2, steps=5) == {"step 2", "step 3"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_never_began_leaves_no_file(tmp_path: Path) -> None:
    tracing(tmp_path, first_step=9).close()
    assert list(tmp_path.iterdir()) == []


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both are counted from 1"):
        tracing(tmp_path, steps=0)
