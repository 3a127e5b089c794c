"""The benchmarks of the axes run, their peers train what Shoal trains, and memory follows the formula."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def answer(name: str, *words: str) -> Any:
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), "--json", *words],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_axis_is_timed_beside_a_peer_that_trains_the_same() -> None:
    found = answer(
        "parallel.py", "--quick", "--rounds", "1", "--steps", "1", "--only", "tensor,pipeline,context,experts"
    )
    beside = {row["name"]: row for rows in found.values() for row in rows if "peer" in row}
    for axis in (
        "tp(2)",
        "tp(2, sequence=True)",
        "pp(2, '1f1b', micro=8)",
        "cp(2, 'ring')",
        "cp(2, 'ulysses')",
        "ep(2)",
    ):
        assert beside[axis]["of_peer"] > 0
        assert beside[axis]["of_limit"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_shares_memory_holds_half_of_what_ddp_holds() -> None:
    rows = {row["name"]: row for row in answer("memory.py", "--only", "host")["rows"]}
    for row in rows.values():
        assert row["held_between_steps"] == pytest.approx(row["formula_bytes_per_parameter"], rel=0.01)
    assert rows["dp(2, via=shared())"]["held_of_ddp"] <= 0.51
    assert rows["dp(2, via=shared())"]["peak_of_ddp"] <= 0.6


@pytest.mark.timeout(300)
def test_activations_follow_the_schedule() -> None:
    rows = answer("activation_memory.py", "--quick", "--micro", "2,4")["rows"]
    assert all(row["in_flight"] == row["formula_in_flight"] for row in rows)
    kept = {(row["name"], row["rank"]): row for row in rows}
    for rank in (0, 1):
        assert kept["pp(2, 'gpipe', micro=4)", rank]["held_over_formula"] == pytest.approx(1, abs=0.05)
        assert kept["pp(2, '1f1b', micro=4)", rank]["held_mb"] < 0.7 * kept["pp(2, 'gpipe', micro=4)", rank]["held_mb"]
        again = [kept[f"pp(2, '1f1b', micro=4) * recompute('{kind}')", rank] for kind in ("full", "selective")]
        assert again[0]["one_mb"] < again[1]["one_mb"] < kept["pp(2, '1f1b', micro=4)", rank]["one_mb"]


@pytest.mark.timeout(120)
def test_a_slow_link_is_raced_over_also_without_root() -> None:
    found = answer("slow_link.py", "--quick", "--emulated", "--rate", "10mbit", "--only", "DDP,dp(2)")
    assert found["emulated"]
    rows = {row["name"]: row for row in found["rates"]["10mbit"]["rows"]}
    assert rows.keys() == {"DDP", "dp(2)"}
    for row in rows.values():
        assert row["steps_to_target"] == 3
        # The gradient of the tiny model, in float32, at 10 Mb/s and not faster.
        assert row["sent_mb_a_step"] == pytest.approx(0.17, abs=0.05)
        assert row["step_ms"] >= 8 * row["sent_mb_a_step"] / 10 * 1000
        assert row["seconds_to_target"] == pytest.approx(3 * row["step_ms"] / 1000, abs=0.11)


def test_the_sentence_on_compression_follows_from_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    says = loaded("slow_link", monkeypatch).where_compression_loses

    def row(name: str, seconds: float | None, step_ms: int) -> dict[str, Any]:
        return {"name": name, "seconds_to_target": seconds, "step_ms": step_ms}

    dense = row("dp(2)", 10.0, 100)
    text = says(
        [
            row("DDP", 12.0, 120),
            dense,
            row("dp(2, compress=int8())", 4.0, 40),
            row("dp(2, compress=sign())", 15.0, 30),
            row("dp(2, compress=fp16())", 11.0, 110),
            row("dp(2, compress=topk(0.01))", None, 20),
        ]
    )
    assert text.startswith("1 of 4 compressions reach the target sooner than dense dp(2) (10.0 s)")
    assert "the best is dp(2, compress=int8()) (4.0 s), 3.00 times as fast as DDP" in text
    assert "loses by dp(2, compress=fp16()): their steps are slower than dense ones" in text
    assert "loses by dp(2, compress=sign()), dp(2, compress=topk(0.01)): their steps are faster, but too many" in text
    assert says([dense]).startswith("Where compression loses cannot be said")


def test_steps_that_send_more_than_the_timed_ones_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = loaded("slow_link", monkeypatch).seconds_to_target
    even = {"steps": 4, "sent": [1000] * 4}
    assert seconds(even, 0.5, 1000, 1e8) == 2.0
    warming_up = {"steps": 4, "sent": [1_449_000, 1000, 1000, 1000]}
    assert seconds(warming_up, 0.5, 1000, 1e8) == pytest.approx(2.0 + 1_514_000 * 8 / 1e8)


def test_a_peer_with_other_losses_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = loaded("parallel", monkeypatch)
    parallel.require_agreement({"mine": [5.0, 4.0], "other": [5.00009, 4.0]}, {"mine": "other"})
    for losses in ([5.0, 4.0002], [5.0, float("nan")]):
        with pytest.raises(RuntimeError, match="train differently"):
            parallel.require_agreement({"mine": [5.0, 4.0], "other": losses}, {"mine": "other"})
    with pytest.raises(RuntimeError, match="told no loss"):
        parallel.require_agreement({"mine": [5.0]}, {"mine": "other"})


def test_an_unknown_case_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "parallel.py"), "--only", "tensr"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "--only tensr: there is no such case; there are tensor, pipeline" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_holds_half_of_a_model_starts_with_little_more_than_that() -> None:
    found = {row["name"]: row["fraction"] for row in answer("start_memory.py")["rows"]}
    assert found.pop("dp(2)") > 1.0
    assert all(fraction <= 0.6 for fraction in found.values()), found


def test_an_exchange_of_islands_is_timed_at_two_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    flips = loaded("link_flips", monkeypatch)
    alone_s, exchange_s = 0.1, 2.0
    names = flips.timed_as("dp(2, sync=diloco(32))")
    times = {name: [alone_s + exchange_s / period] for name, period in zip(names, flips.SHORT, strict=True)}
    assert flips.step_s("dp(2, sync=diloco(32))", times) == pytest.approx(alone_s + exchange_s / 32)
    assert flips.timed_as("dp(2, zero=3)") == ["dp(2, zero=3)"]


def test_parts_that_were_measured_are_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flips = loaded("link_flips", monkeypatch)
    assert flips.Parts(tmp_path, 1).get("a", lambda: 1) == 1
    parts = flips.Parts(tmp_path, 1)
    assert [parts.get("a", lambda: 2), parts.get("b", lambda: 3), parts.get("c", lambda: 4)] == [1, 3, None]
