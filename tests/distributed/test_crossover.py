"""The benchmark of crossings: it runs on emulated links, and finds a crossing where there is one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from distributed.test_benchmarks import answer, loaded


def rows(*pairs: tuple[float, float, float]) -> list[dict[str, Any]]:
    return [{"bytes_per_s": at, "dense_s": [dense_s], "compressed_s": [other_s]} for at, dense_s, other_s in pairs]


def test_the_crossing_is_read_off_between_the_bandwidths_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    crossing = loaded("crossover", monkeypatch).measured_crossing
    even = rows((1e8, 2.0, 1.0), (4e8, 0.5, 1.0))
    assert crossing(even) == pytest.approx(2e8)
    # Points further away bend the curve, and do not count.
    assert crossing(rows((1e7, 9.0, 1.0), (1e8, 2.0, 1.0), (4e8, 0.5, 1.0), (8e8, 0.49, 1.0))) == pytest.approx(2e8)
    assert crossing(even, slowdown=2.0) == pytest.approx(1e8)
    assert math.isnan(crossing(rows((1e8, 1.0, 1.1), (4e8, 1.1, 1.1))))


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = loaded("crossover", monkeypatch).busy
    assert busy({"disturbed": 0.01}, [{"name": "int8()", "quiet_turns": 9}]) == []
    first, second = busy({"disturbed": 0.5}, [{"name": "int8()", "quiet_turns": 1}])
    assert "50% of the cores" in first
    assert "int8()" in second


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_crossing_is_predicted_and_measured_on_emulated_links() -> None:
    found = answer("crossover.py", "--job", "language:tiny", "--only", "int8()", "--rounds", "1", "--seconds", "2")
    (row,) = found["rows"]
    assert row["name"] == "int8()"
    assert row["predicted_gbit_s"] > 0
    at = [step["gbit_s"] for step in row["steps"]]
    assert at[0] < row["predicted_gbit_s"] < at[-1]
    assert all(step["dense_ms"] > 0 and step["compressed_ms"] > 0 for step in row["steps"])
