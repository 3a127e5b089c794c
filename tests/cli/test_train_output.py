"""What `shoal train` shows and leaves: the progress, the run folder and every file in it, the JSON object."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.command import COMMAND, Place
from cli.conftest import Shoal
from cli.jobs import write_job
from shoal.comm.ledger import Ledger
from shoal.training.record.run import read_run

pytestmark = pytest.mark.processes

FILES = {".lock", "run.json", "steps.jsonl", "validation.jsonl", "ledger.json", "events", "trace.json", "checkpoints"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "strategy",
    ["serial", "dp(2)", "dp(2, zero=1)", "dp(2, zero=2) * accumulate(2)", "dp(2, zero=3) * recompute('full')"],
)
def test_the_run_folder_holds_a_whole_and_true_record(strategy: str, shoal: Shoal, tmp_path: Path) -> None:
    done = shoal("train", "language:tiny", "--steps", "6", "-s", strategy, "--folder", "run", "--trace")
    assert done.status == 0, done.err
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == FILES
    run = read_run(folder)
    assert (run.status, run.job, run.seed) == ("finished", "language:gpt:tiny", 0)
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [row["samples"] for row in run.steps] == [24 * step for step in range(1, 7)]
    assert run.losses[0] > run.losses[-1] > 0
    assert [row["step"] for row in run.validation] == [6]
    assert run.environment["threads"] == 1
    assert run.memory_bytes is not None
    assert run.memory_bytes > 50 << 20
    assert run.predicted_ledger is not None
    assert run.ledger.differences(run.predicted_ledger) == []
    assert (run.ledger.bytes > 0) == (run.world > 1)
    assert run.ledger_of_run.only("gradient").bytes == 6 * run.ledger.only("gradient").bytes
    trace = json.loads((folder / "trace.json").read_text())
    assert any("backward" in str(event.get("name", "")).lower() for event in trace["traceEvents"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]


def test_tensorboard_reads_the_curves(shoal: Shoal, tmp_path: Path) -> None:
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter

    assert RecordWriter is not None
    assert shoal("train", write_job(tmp_path), "--steps", "3", "--folder", "run").status == 0
    [file] = (tmp_path / "run" / "events").iterdir()
    data, events = file.read_bytes(), []
    while data:
        # A TFRecord: eight bytes of length, four of checksum, the event, four of checksum.
        size = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    values = {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}
    rows = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [values["training/loss", step] for step in (1, 2, 3)] == pytest.approx([row["loss"] for row in rows])
    assert ("validation/loss", 3) in values


def test_one_step_is_enough_for_a_ledger(shoal: Shoal, tmp_path: Path) -> None:
    assert shoal("train", write_job(tmp_path), "--steps", "1", "-s", "dp(2)", "--folder", "run").status == 0
    ledgers = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert Ledger.from_json(ledgers["steady_step"]).differences(Ledger.from_json(ledgers["predicted"])) == []


def test_without_a_terminal_progress_is_plain_lines(shoal: Shoal, tmp_path: Path) -> None:
    done = shoal("train", write_job(tmp_path), "-s", "dp(2)", "--checkpoint-every", "6")
    assert done.status == 0
    lines = done.err.splitlines()
    assert lines[0] == "checking the strategy, once: two steps in float64 under dp(2)"
    assert lines[1].startswith("step 1/12  loss ")
    assert [line.split(":")[0] for line in lines if line.startswith("validation")] == [
        "validation at step 4",
        "validation at step 8",
        "validation at step 12",
    ]
    assert sum(line.startswith("checkpoint runs/") for line in lines) == 2
    assert "\x1b" not in done.err + done.out
    assert "finished after 12 steps" in done.out
    assert "dp(2)  (2 ranks)" in done.out


def test_runs_get_folders_of_their_own(shoal: Shoal, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for _ in range(2):
        assert shoal("train", job, "--steps", "1").status == 0
    first, second = sorted((tmp_path / "runs").iterdir())
    assert first.name.endswith("-line-1")
    assert second.name.endswith("-line-2")


def test_a_finished_run_that_is_resumed_says_the_same_and_does_nothing(shoal: Shoal, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    assert shoal("train", job, "--folder", "run").status == 0
    files = [tmp_path / "run" / name for name in ("steps.jsonl", "validation.jsonl")]
    before = [file.read_bytes() for file in files]
    loss = read_run(tmp_path / "run").summary["loss"]
    done = shoal("train", job, "--resume", "run")
    assert done.status == 0
    assert ["loss", f"{loss:.4f}"] in [line.split() for line in done.out.splitlines()]
    assert [file.read_bytes() for file in files] == before
    # As a batch script says it, which does not know whether there is a run yet.
    done = shoal("train", job, "--resume", "run", "--folder", str(tmp_path / "run"), "--steps", "14")
    assert done.status == 0
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 14


@pytest.mark.timeout(60)
def test_json_is_alone_on_standard_output_whatever_the_job_prints(place: Place, tmp_path: Path) -> None:
    job = write_job(tmp_path, before="print('loading')\nos.write(1, b'raw\\n')", forward="print('forward')")
    done = place.shoal("train", job, "--steps", "2", "--strategy", "dp(2)", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["status"], outcome["step"], outcome["world"]) == ("finished", 2, 2)
    assert outcome["ledger"] == outcome["predicted"]
    assert "forward" in done.stderr
    assert "raw" in done.stderr


@pytest.mark.timeout(60)
def test_verify_prints_one_json_object(place: Place, tmp_path: Path) -> None:
    job = write_job(tmp_path, forward="print('forward')")
    done = place.shoal("verify", job, "--strategy", "dp(2, zero=3)", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    certificate = json.loads(done.stdout)
    assert certificate["passed"] is True
    assert certificate["ledger_matches"] is True
    needed = {"contract", "passed", "max_rel_diff", "tolerance", "worst", "ledger_matches", "steps"}
    assert needed <= certificate.keys()


@pytest.mark.timeout(60)
def test_on_a_terminal_a_bar_shows_loss_speed_memory_and_time_left(place: Place, tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "train", "language:tiny", "--steps", "40", "--strategy", "dp(2)", "--folder", "run"],
        cwd=tmp_path,
        env={**place.environment(), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = read_terminal(mine, process)
    place.require_clean()
    assert process.returncode == 0, shown
    assert "dp(2)" in shown
    assert "40/40" in shown
    for words in ("loss ", " ms", "/s", " MiB", "left", "━", "validation at step 40", "finished after 40 steps"):
        assert words in shown


def read_terminal(descriptor: int, process: subprocess.Popen[bytes]) -> str:
    data, end_s = b"", time.monotonic() + 45
    while time.monotonic() < end_s:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                data += os.read(descriptor, 65536)
            except OSError:  # The other end is closed: the command has ended.
                break
    os.close(descriptor)
    process.wait(5)
    return data.decode(errors="replace")


def test_the_command_and_the_module_are_the_same(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['shoal', '--help']; from shoal.cli.main import run; run()"],
        env=place.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.splitlines()[2:] == place.shoal("--help").stdout.splitlines()[2:]
