"""`shoal explain --picture`: the axes drawn as SVG, and every reason why they cannot be."""

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


def test_it_writes_the_drawing_and_says_where(place: Place) -> None:
    done = place.shoal("explain", "tp(2, sequence=True)", "--picture", "schön <1>.svg")
    assert (done.returncode, done.stderr) == (0, "")
    assert "drawn in schön <1>.svg" in done.stdout
    assert "all-gather" in (place.folder / "schön <1>.svg").read_text(encoding="utf-8")
    assert ElementTree.parse(place.folder / "schön <1>.svg").getroot().tag.endswith("svg")


def test_nothing_is_drawn_unless_asked_for(place: Place) -> None:
    assert "drawn in" not in place.shoal("explain", "tp(2)").stdout
    assert list(place.folder.glob("*.svg")) == []


def test_json_names_the_file_and_both_pictures_may_be_asked_for(place: Place) -> None:
    done = place.shoal("explain", "pp(2) * tp(2)", "--picture", "t.svg", "--timeline", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["picture"] == {"file": "t.svg"}
    assert told["timeline"]["file"] == "timeline.svg"
    assert {path.name for path in place.folder.glob("*.svg")} == {"t.svg", "timeline.svg"}
    assert "picture" not in json.loads(place.shoal("explain", "tp(2)", "--json").stdout)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serial", "--picture", "a.svg"), ["no axis with a picture", "dp, pp, tp, cp, ep and spatial"]),
        (("tp(100)", "--picture", "a.svg"), ["100 ranks are too small to be seen"]),
        (("tp(2)", "--picture", "nowhere/a.svg"), ["--picture 'nowhere/a.svg'", "No such file"]),
        (("tp(2)", "--picture", "."), ["--picture '.'", "name a file that can be written"]),
        (("tp(2)", "--picture", "a\0b"), ["--picture", "null"]),
        (("tp(2)", "--picture", "a.bmp"), ["--picture 'a.bmp'", "pictures are drawn as SVG, not as .bmp"]),
        (("pp(2)", "--timeline-file", "a.PNG"), ["--timeline-file 'a.PNG'", "drawn as SVG, not as .PNG"]),
        (("tp(2)", "--picture", ""), ["--picture ''"]),
        (("language", "--picture", "a.svg"), ["--picture draws a strategy", "'language' is a job"]),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_explained(words: tuple[str, ...], expected: list[str], shoal: Shoal) -> None:
    done = shoal("explain", *words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("shoal: ")
    assert "Traceback" not in done.err
    assert [part for part in expected if part not in done.err] == []
    assert not Path("a.svg").exists()


def test_a_picture_needs_neither_torch_nor_numpy(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TELLING_MODULES, "explain", "dp(2) * cp(2) * tp(2) * ep(2)", "--picture", "a.svg"],
        env=place.environment(),
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1].split() == ["loaded:"]
