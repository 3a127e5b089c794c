"""Loggers besides TensorBoard: each is read back by its own library, offline, also after a resume."""

from __future__ import annotations

import csv
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.options import WrongOption
from shoal.training.record.loggers import Loggers, require_loggers
from shoal.training.record.recorder import Recorder
from shoal.training.record.run import read_json


def record(folder: Path, log: str, *, steps: range, resumed_at: int | None = None) -> None:
    recorder = Recorder(
        folder, job_name="mine", strategy="dp(2)", world=2, seed=0, arguments={}, log=log, resumed_at=resumed_at
    )
    for step in steps:
        row = {"step": step, "loss": 10.0 / step, "lr": 0.1, "grad_norm": float("nan"), "step_s": 0.5}
        recorder.step(row)
    recorder.metrics(steps[-1], {"loss": 1.0 / steps[-1]})
    recorder.close("finished")


def resumed(folder: Path, log: str) -> None:
    """Steps 1 to 4, then again from 2."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        record(folder, log, steps=range(1, 5))
        record(folder, log, steps=range(3, 7), resumed_at=2)


def test_csv_has_a_row_for_each_step_and_is_cut_back(tmp_path: Path) -> None:
    resumed(tmp_path, "csv")
    rows = list(csv.DictReader((tmp_path / "steps.csv").open()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [float(row["loss"]) for row in rows] == [10.0 / step for step in range(1, 7)]
    assert set(rows[0]) == {"step", "loss", "lr", "step_s"}
    assert [row["step"] for row in csv.DictReader((tmp_path / "validation.csv").open())] == ["6"]


def wandb_records(data: bytes) -> list[bytes]:
    """Of a .wandb file: after a header of 7 bytes, records in blocks of 32 KiB, as LevelDB's log has them."""
    found, at, parts = [], 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # Full, or the last part.
            found.append(parts)
            parts = b""
    return found


@pytest.mark.long
@pytest.mark.processes
def test_wandb_offline_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'shoal[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    resumed(tmp_path, "wandb")
    files = sorted(tmp_path.rglob("*.wandb"))
    assert len(files) == 2  # One for each start, of one run: `wandb sync` joins them.
    assert len({file.name for file in files}) == 1
    assert read_json(tmp_path / "run.json")["loggers"]["wandb"] in files[0].name
    found: dict[str, dict[int, float]] = {}
    for file in files:
        for data in wandb_records(file.read_bytes()):
            entry = wandb_internal_pb2.Record()
            entry.ParseFromString(data)
            values = {item.key or "/".join(item.nested_key): item.value_json for item in entry.history.item}
            for name, value in values.items():
                if "/" in name:
                    found.setdefault(name, {})[entry.history.step.num] = json.loads(value)
    assert found["training/loss"] == {step: 10.0 / step for step in range(1, 7)}
    assert found["validation/loss"][6] == pytest.approx(1.0 / 6)
    assert "training/grad_norm" not in found


@pytest.mark.long
@pytest.mark.processes
def test_mlflow_in_files_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'shoal[mlflow]'")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    resumed(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    runs = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    assert len(runs) == 1
    assert (runs[0].info.status, runs[0].data.params["strategy"]) == ("FINISHED", "dp(2)")
    history = {each.step: each.value for each in client.get_metric_history(runs[0].info.run_id, "training/loss")}
    assert history == {step: 10.0 / step for step in range(1, 7)}


class Broken:
    identity = None

    def __init__(self, *given: Any, **more: Any) -> None: ...

    def add(self, step: int, values: Any) -> None:
        raise ConnectionError("the server has gone")


def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.training.record.log_csv.CsvLogger", Broken)
    with pytest.warns(UserWarning, match="--log csv failed and is left out from here on: the server has gone") as seen:
        record(tmp_path, "csv", steps=range(1, 5))
    assert len(seen) == 1
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 4


def test_what_is_not_asked_for_costs_nothing(tmp_path: Path) -> None:
    none = Loggers(None, tmp_path, {}, resumed_at=None)
    started = time.perf_counter()
    for step in range(1000):
        none.add(step, {"training/loss": 1.0})
    assert time.perf_counter() - started < 0.1


def test_loggers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(WrongOption, match=r"--log wandbb: no such logger \(did you mean 'wandb'\?\)"):
        require_loggers("csv, wandbb")
