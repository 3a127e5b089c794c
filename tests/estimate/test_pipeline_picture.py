"""Pictures of pipelines: they show every pass at its time, and stay well-formed whatever they are given."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.estimate.pipeline.simulate import simulate_term
from shoal.pictures.timeline import MOST_COLUMNS, captions, timeline_rows, timeline_svg, timeline_text
from shoal.strategy import parse
from shoal.strategy.terms import pp
from strategy.test_schedule import pipelines

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[ElementTree.Element]:
    """The rectangles with a tooltip: one for each pass."""
    return [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_1f1b_as_text() -> None:
    assert timeline_text(simulate_term(pp(2, micro=3))) == (
        "time    0     2     4     6     8     10\n"
        "rank 0  F0 F1 .  .  B0=== F2 B1=== .  B2===\n"
        "rank 1  .  F0 B0=== F1 B1=== F2 B2=== .  ."
    )


def test_chunks_are_told_apart_in_text() -> None:
    text = timeline_text(simulate_term(pp(2, "zero-bubble", micro=1, chunks=2)))
    assert re.findall(r"[FBW]\d\w", text.splitlines()[1]) == ["F0a", "F0b", "B0b", "W0b", "B0a", "W0a"]


def test_more_chunks_than_letters_are_numbered() -> None:
    assert "F0.29 " in timeline_text(simulate_term(pp(1, "interleaved", chunks=30)))


@given(pipelines())
def test_text_has_a_line_a_rank_and_every_pass_in_it(term: pp) -> None:
    timeline = simulate_term(term)
    ruler, *lines = timeline_text(timeline).splitlines()
    assert ruler.startswith("time ")
    assert len(lines) == term.n
    for rank, (line, lane) in enumerate(zip(lines, timeline.lanes, strict=True)):
        name, cells = line.split("  ", 1)
        assert name.strip() == f"rank {rank}"
        shown = re.findall(r"[FBW]\d+", cells)
        assert shown == [f"{box.action.kind[0]}{box.action.micro}" for box in lane]
        assert ("." in cells) == (timeline.idle_s[rank] > 0) or term.chunks > 1


@given(pipelines(), st.integers(1, 200))
def test_a_narrow_terminal_breaks_the_timeline_into_bands_that_say_the_same(term: pp, width: int) -> None:
    timeline = simulate_term(term)
    bands = "\n".join("".join(text for _, text in row) for row in timeline_rows(timeline, width=width)).split("\n\n")
    margin = len(f"rank {term.n - 1}  ")
    joined = ["".join(band.splitlines()[1 + rank][margin:] for band in bands).rstrip() for rank in range(term.n)]
    assert joined == [line[margin:] for line in timeline_text(timeline).splitlines()[1:]]
    if width >= 40:
        assert max(len(line) for band in bands for line in band.splitlines()) <= width


@given(pipelines())
def test_the_drawing_has_a_box_for_each_pass_inside_its_frame(term: pp) -> None:
    timeline = simulate_term(term)
    svg = timeline_svg(timeline, str(term))
    width, height = (float(ElementTree.fromstring(svg).attrib[name]) for name in ("width", "height"))
    found = boxes(svg)
    assert sorted(rect.findtext(f"{SVG}title", "") for rect in found) == sorted(
        str(box.action) for lane in timeline.lanes for box in lane
    )
    for rect in found:
        x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + wide <= width
        assert y >= 0
        assert y + high <= height


def test_the_drawing_tells_passes_and_chunks_apart_by_colour() -> None:
    plain = {rect.attrib["fill"] for rect in boxes(timeline_svg(simulate_term(pp(2)), ""))}
    split = {rect.attrib["fill"] for rect in boxes(timeline_svg(simulate_term(pp(2, "zero-bubble")), ""))}
    chunks = {rect.attrib["fill"] for rect in boxes(timeline_svg(simulate_term(pp(2, "interleaved", chunks=3)), ""))}
    assert (len(plain), len(split), len(chunks)) == (2, 3, 6)
    assert plain < split


def test_boxes_lie_where_the_clock_says() -> None:
    rects = boxes(timeline_svg(simulate_term(pp(2, micro=1)), "one"))
    places = {rect.findtext(f"{SVG}title"): (rect.attrib["x"], rect.attrib["width"]) for rect in rects}
    left, unit = float(places["F(stage 0, micro-batch 0)"][0]), float(places["F(stage 0, micro-batch 0)"][1])
    assert float(places["BW(stage 1, micro-batch 0)"][0]) == left + 2 * unit
    assert float(places["BW(stage 0, micro-batch 0)"][1]) == 2 * unit


@given(st.text(max_size=60))
def test_any_title_leaves_the_drawing_well_formed(title: str) -> None:
    svg = timeline_svg(simulate_term(pp(1)), title + "<&>'\"\x00\ud800")
    shown = ElementTree.fromstring(svg.encode("utf-8")).findtext(f"{SVG}title")
    assert shown is not None
    assert shown.endswith("<&>'\"")


def test_the_drawing_refers_to_nothing_outside() -> None:
    svg = timeline_svg(simulate_term(pp(4, micro=8)), "pp")
    assert re.findall(r"https?://[^'\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "href" not in svg


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (pp(4, "gpipe", micro=8), ["27.3%", "(n - 1) / (m + n - 1) = 27.3%", "8 micro-batches on every rank"]),
        (pp(4, micro=8), ["27.3%", "rank by rank: 4, 3, 2, 1 micro-batches"]),
        (pp(4, "interleaved", micro=8, chunks=2), ["(vm + n - 1) = 15.8%", "11, 9, 7, 5", "1/2 of a rank's layers"]),
        (pp(4, "zero-bubble", micro=8), ["(n - 1) / (3m + n - 1) = 11.1%"]),
        (pp(4, "zero-bubble", micro=8, chunks=2), ["no closed formula"]),
        (pp(4, "pipedream", micro=8), ["start and end of the run included", "0.0% while the pipeline is full"]),
        (pp(4, "pipedream", micro=1), ["never full"]),
        (pp(40, micro=40), ["40 micro-batches on rank 0, 1 on rank 39"]),
    ],
    ids=str,
)
def test_captions_compare_the_simulated_bubble_with_the_formula(term: pp, words: list[str]) -> None:
    said = "\n".join(captions(simulate_term(term)))
    assert [part for part in words if part not in said] == []
    svg = timeline_svg(simulate_term(term), "").replace("&#39;", "'")
    assert all(line in svg for line in captions(simulate_term(term)))


def test_passes_of_very_different_length_do_not_make_an_endless_line() -> None:
    text = timeline_text(simulate_term(pp(2), forward_s=[1e-9, 1e3], backward_s=[1e-9, 1e3]))
    assert max(map(len, text.splitlines())) <= MOST_COLUMNS + 20


def test_a_step_without_cost_can_be_drawn() -> None:
    timeline = simulate_term(pp(2), forward_s=0, backward_s=0)
    assert timeline_text(timeline) == ""
    assert len(boxes(timeline_svg(timeline, "nothing"))) == 8


def test_the_pictures_in_the_documentation_are_what_the_command_beside_them_draws() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    commands = re.findall(r'^`shoal explain "(.+?)" --timeline-file (\S+)`', page, re.MULTILINE)
    assert [file for _, file in commands] == re.findall(r"\(pictures/(\S+)\)", page)
    for text, file in commands:
        term = parse(text).term(pp)
        assert term is not None
        stored = (Path(__file__).parents[2] / "docs" / "pictures" / file).read_text(encoding="utf-8")
        assert stored == timeline_svg(simulate_term(term), str(term))
