"""`shoal explain --timeline`: the pipeline drawn in the terminal and as SVG, and every reason why it cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.command import Place
from cli.conftest import Shoal
from cli.test_answers import TELLING_MODULES

ASKED = "pp(4, '1f1b', micro=8)"


def test_it_prints_the_timeline_and_writes_the_drawing(place: Place) -> None:
    done = place.shoal("explain", ASKED, "--timeline")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  rank 3  .  .  .  F0 B0=== F1 B1===" in done.stdout
    assert "bubble: ranks idle 27.3% of the time; formula (n - 1) / (m + n - 1) = 27.3%" in done.stdout
    assert "in flight at most, rank by rank: 4, 3, 2, 1 micro-batches" in done.stdout
    assert "drawn in timeline.svg" in done.stdout
    assert ElementTree.parse(place.folder / "timeline.svg").getroot().tag.endswith("svg")


def test_nothing_is_drawn_unless_asked_for(place: Place) -> None:
    assert "rank 0  F0" not in place.shoal("explain", ASKED).stdout
    assert list(place.folder.glob("*.svg")) == []


def test_the_file_may_be_named_and_that_alone_asks_for_it(place: Place) -> None:
    done = place.shoal("explain", f"dp(2) * {ASKED}", "--timeline-file", "schön <1>.svg")
    assert done.returncode == 0
    assert "drawn in schön <1>.svg" in done.stdout
    assert ElementTree.parse(place.folder / "schön <1>.svg").getroot() is not None
    assert not (place.folder / "timeline.svg").exists()


def test_json_includes_the_timeline(place: Place) -> None:
    done = place.shoal("explain", "pp(2, 'zero-bubble', micro=4)", "--timeline", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)["timeline"]
    assert told["file"] == "timeline.svg"
    assert told["makespan"] == 13
    assert told["bubble"] == told["bubble_formula"] == 1 / 13
    assert told["in_flight"] == [2, 2]
    assert [len(lane) for lane in told["lanes"]] == [12, 12]
    assert told["lanes"][1][0] == {"kind": "F", "stage": 1, "micro": 0, "start": 1.0, "stop": 2.0}
    assert len(told["text"]) == 3
    assert (place.folder / "timeline.svg").exists()


def test_json_without_a_timeline_has_none(place: Place) -> None:
    assert "timeline" not in json.loads(place.shoal("explain", ASKED, "--json").stdout)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("dp(2)", "--timeline"), ["dp(2) has no pipeline", "pp(4, '1f1b', micro=8)"]),
        (("serial", "--timeline"), ["no pipeline"]),
        (("pp(2, 'interleaved', micro=3, chunks=2)", "--timeline"), ["do not make full rounds of 2", "nearest legal"]),
        (("pp(1024, '1f1b', micro=1000000000)", "--timeline"), ["2,048,000,000,000 passes", "fewer micro-batches"]),
        ((ASKED, "--timeline-file", "nowhere/a.svg"), ["--timeline-file 'nowhere/a.svg'", "No such file"]),
        ((ASKED, "--timeline-file", "."), ["--timeline-file '.'", "name a file that can be written"]),
        ((ASKED, "--timeline-file", "a\0b"), ["--timeline-file", "null"]),
        ((ASKED, "--timeline-file", ""), ["--timeline-file ''"]),
        (("pp(4", "--timeline"), ["closing parenthesis missing"]),
    ],
)
def test_a_timeline_that_cannot_be_drawn_is_explained(
    words: tuple[str, ...], expected: list[str], shoal: Shoal
) -> None:
    done = shoal("explain", *words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("shoal: ")
    assert "Traceback" not in done.err
    assert [part for part in expected if part not in done.err] == []
    assert not Path("timeline.svg").exists()


def test_a_timeline_needs_neither_torch_nor_numpy(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TELLING_MODULES, "explain", ASKED, "--timeline"],
        env=place.environment(),
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].split() == ["loaded:"]
