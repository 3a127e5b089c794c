"""What a terminal shows of a search, narrow ones included."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from searching.test_page import found
from shoal.api.search import Search
from shoal.cli.search import LiveTrials, _print


@pytest.mark.parametrize("width", [60, 120])
def test_the_live_table_keeps_its_figures_on_narrow_terminals(width: int) -> None:
    results = found("tpe")
    long = {f"a_long_name_{number}": 0.123456 for number in range(9)}
    results["trials"] = [{**row, "params": long} for row in results["trials"]]
    results["trials"][3]["state"] = "running"
    live = LiveTrials()
    live.steps[3] = 5, 27
    table = live._table(results)
    live.close()
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table)
    lines = shown.get().splitlines()
    assert any("3" in line and "step 5/27" in line for line in lines)
    assert any("finished" in line and "100" in line for line in lines)
    assert len(lines) == 2 + 8  # A line for each trial.
    assert all("a_long" in line for line in lines[2:])


def test_the_front_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _print(Search(folder=tmp_path, results=found("evolution")))
    out = capsys.readouterr().out
    assert "front, predicted for this" in out
    assert "10 ms" in out
    assert str(tmp_path / "search.html") in out.replace("\n", "")
