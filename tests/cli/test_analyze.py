"""`shoal analyze`: what it prints, what it gives as JSON, what it draws, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.command import Place
from cli.conftest import Shoal
from shoal.analysis import preset_network
from shoal.analysis.network import intensity, parallelism
from shoal.cli.analyze import short

DOCS = Path(__file__).parents[2] / "docs"

ODD_JOB = """
from functools import partial
import torch
from torch import nn
from shoal.job import Job, TensorData, cross_entropy

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        print("the model speaks")
        return torch.erfinv(torch.tanh(self.head(x)))

data = TensorData(x=torch.zeros(16, 6), y=torch.zeros(16, dtype=torch.long))
job = Job(name="odd", model=Odd, train=data, loss=cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1),
          global_batch=8, steps=1)
"""


def test_it_prints_layers_totals_axes_bounds_and_algorithms(shoal: Shoal) -> None:
    done = shoal("analyze", "vgg16", "--batch", "16")
    assert (done.status, done.err) == (0, "")
    for part in (
        "vgg16  138 M parameters, batch 16",
        "3x3, 64 -> 128 on 16 x 112x112",
        "W/D",
        "16 samples in the batch",
        "1,000,000",
        "max(W/p, D) <= T <= W/p + D",
        "winograd F(4, 3)",
        "best by depth",
    ):
        assert part in done.out
    assert "Unknown" not in done.out


def test_blocks_that_repeat_take_one_place(shoal: Shoal) -> None:
    out = shoal("analyze", "gpt:175b").out
    assert "blocks.0 .. 95: 96 alike, each" in out
    assert out.count("attention.query") == 1
    assert "Convolutions" not in out


def test_a_network_of_very_many_layers_shows_its_blocks_only(shoal: Shoal) -> None:
    out = shoal("analyze", "densenet121").out
    assert "dense4.15" in out
    assert "norm1" not in out


def test_json_has_everything(shoal: Shoal) -> None:
    told = json.loads(shoal("analyze", "densenet121", "--batch", "2", "--json").out)
    assert (told["network"], told["batch"], told["parameters"]) == ("densenet121", 2, 7_978_856)
    assert sum(len(group["layers"]) * group["count"] for group in told["groups"]) == 427
    for row in told["bounds"]:
        assert row["least"] <= row["most"]
    assert (told["bounds"][0]["processors"], told["bounds"][-1]["processors"]) == (1, 10**6)
    assert {axis["axis"] for axis in told["concurrency"]} == {"dp", "pp", "tp", "cp", "ep", "spatial"}
    for row in told["convolutions"]:
        assert {"direct", "im2col", "fft"} <= set(row["algorithms"])
        assert row["best_by_work"] in row["algorithms"]
    layer = told["groups"][0]["layers"][0]
    assert set(layer["forward"]) == set(layer["weight_gradient"]) == {"work", "depth", "bytes"}


def test_a_job_is_traced(shoal: Shoal) -> None:
    told = json.loads(shoal("analyze", "language", "--batch", "4", "--json").out)
    assert (told["network"], told["batch"], told["parameters"]) == ("language:gpt:tiny", 4, 42_688)
    assert "blocks.0 .. 1: 2 alike, each" in shoal("analyze", "language").out


def test_an_unknown_operator_is_flagged(shoal: Shoal) -> None:
    Path("odd.py").write_text(ODD_JOB)
    done = shoal("analyze", "odd.py")
    assert done.status == 0
    assert "Unknown operators" in done.out
    assert "erfinv: no formula for it; counted by its shapes, 1 times" in done.out


def test_json_stays_alone_when_the_model_speaks(place: Place) -> None:
    (place.folder / "odd.py").write_text(ODD_JOB)
    done = place.shoal("analyze", "odd.py", "--json")
    assert json.loads(done.stdout)["unknown"] == {"erfinv": 1}
    assert "the model speaks" in done.stderr


@pytest.mark.parametrize("name", ["lenet", "vgg16", "densenet121", "llama3:8b", "mixtral:8x7b"])
def test_the_picture_is_well_formed_and_holds_both_panels(name: str, shoal: Shoal) -> None:
    done = shoal("analyze", name, "--picture", "a.svg")
    assert done.status == 0
    assert "drawn in a.svg" in done.out
    root = ElementTree.parse("a.svg").getroot()
    assert root.tag.endswith("svg")
    words = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert any(word.startswith("W/D = ") for word in words)
    assert any("never faster" in word for word in words)
    # Shares of the work, which add up (to rounding).
    assert sum(float(word.removesuffix("%")) for word in words if word.endswith("%")) == pytest.approx(100, abs=2)
    wide, high = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if element.tag.endswith("polyline"):
            points = [tuple(map(float, point.split(","))) for point in element.attrib["points"].split()]
            assert all(0 <= x <= wide and 0 <= y <= high for x, y in points)


@pytest.mark.parametrize(("name", "file"), [("vgg16", "analyze-vgg16.svg"), ("gpt:175b", "analyze-gpt-175b.svg")])
def test_the_pictures_of_the_page_are_what_it_draws(name: str, file: str, shoal: Shoal) -> None:
    assert f"(pictures/{file})" in (DOCS / "analyze.md").read_text(encoding="utf-8")
    shoal("analyze", name, "--picture", "a.svg")
    assert Path("a.svg").read_text() == (DOCS / "pictures" / file).read_text(encoding="utf-8")


def test_the_table_of_the_page_is_what_it_counts() -> None:
    rows = [line.split("|") for line in (DOCS / "analyze.md").read_text(encoding="utf-8").splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 9 and row[1].strip().startswith("`")]
    assert len(rows) > 10
    for _, name, batch, parameters, work, depth, average, per_byte, _ in rows:
        network = preset_network(name.strip("`"))
        step = network.step
        assert (str(network.batch), short(network.parameters)) == (batch, parameters)
        assert (short(step.work), f"{step.depth:,}", short(parallelism(step))) == (work, depth, average)
        assert f"{intensity(step):.0f}" == per_byte


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("vgg17",), ["nothing is called 'vgg17'", "Did you mean 'vgg16'?"]),
        (("gpt:174b",), ["gpt:175b"]),
        (("language:huge",), ["unknown job 'huge'"]),
        (("nowhere.py",), ["there is no file nowhere.py"]),
        (("vgg16", "--batch", "0"), ["batch"]),
        (("language", "--batch", "100000000"), ["batch 100000000", "samples to train on"]),
        (("vgg16", "--picture", "nowhere/a.svg"), ["--picture 'nowhere/a.svg'", "name a file that can be written"]),
    ],
)
def test_what_cannot_be_analysed_is_refused_in_a_sentence(
    words: tuple[str, ...], expected: list[str], shoal: Shoal
) -> None:
    done = shoal("analyze", *words)
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert [part for part in expected if part not in done.err] == []


@pytest.mark.long
def test_convolutions_are_timed_by_every_method(shoal: Shoal) -> None:
    done = shoal("analyze", "image:tiny", "--batch", "2", "--measure", "--json")
    rows = json.loads(done.out)["measured"]
    assert [row["layers"][0] for row in rows] == ["features.0", "features.3", "features.7", "features.10"]
    for row in rows:
        assert set(row["seconds"]) == {"library", "direct", "im2col", "fft", "winograd"}
        assert row["best_by_time"] in row["seconds"]
        assert row["samples"] == 2
    printed = shoal("analyze", "image:tiny", "--batch", "2", "--measure")
    assert "Convolutions, timed here" in printed.out
