"""Pictures of the axes: they show every rank's part, say true numbers, and stay well-formed whatever they are given."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pictures import MOST_RANKS, NothingToDraw, picture_svg
from shoal.pictures.context import holder, hop
from shoal.pictures.data import held_bytes
from shoal.pictures.svg import Drawing, rank_colour
from shoal.strategy import parse
from shoal.strategy.terms.axes import dp, pp

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs"


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture_svg(parse(text)).encode("utf-8"))


def tips(root: ElementTree.Element) -> Counter[str]:
    return Counter(rect.findtext(f"{SVG}title", "") for rect in root.iter(f"{SVG}rect"))


def said(root: ElementTree.Element) -> str:
    return "\n".join(element.text or "" for element in root.iter(f"{SVG}text"))


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_columns_rows_and_what_lies_between_are_dealt_out_to_every_rank(ranks: int) -> None:
    whole = tips(drawn(f"tp({ranks})"))
    assert whole["every rank"] == 2
    assert {whole[f"rank {rank}"] for rank in range(ranks)} == {3}
    cut = tips(drawn(f"tp({ranks}, sequence=True)"))
    assert cut["every rank"] == 0
    assert {cut[f"rank {rank}"] for rank in range(ranks)} == {5}


def test_the_collectives_of_tensor_parallelism_are_named() -> None:
    assert "all-reduce" in said(drawn("tp(2)"))
    assert "all-gather" not in said(drawn("tp(2)"))
    for cut, what in (("sequence", "1/2 of the tokens"), ("batch", "1/2 of the samples")):
        words = said(drawn(f"tp(2, {cut}=True)"))
        assert all(part in words for part in ("all-gather", "reduce-scatter", what))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_every_rank_of_the_ring_computes_as_many_chunk_products(ranks: int) -> None:
    found = tips(drawn(f"cp({ranks})"))
    for rank in range(ranks):
        products = sum(times for tip, times in found.items() if tip.startswith(f"rank {rank}, after"))
        assert products == 2 * ranks - 1
    assert sum(times for tip, times in found.items() if ", after 0 hops" in tip) == ranks


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_ring_drawn_is_the_ring_that_runs(ranks: int) -> None:
    sequence = pytest.importorskip("shoal.parallel.context.sequence")
    length = 2 * ranks
    for rank in range(ranks):
        held = [chunk.start for chunk in sequence.chunks_of(length, ranks, rank, balanced=True)]
        assert held == [chunk for chunk in range(length) if holder(chunk, ranks) == rank]
        assert [hop(query_rank=rank, key_rank=(rank - h) % ranks, ranks=ranks) for h in range(ranks)] == [*range(ranks)]


def test_ulysses_turns_positions_into_heads_and_back() -> None:
    root = drawn("cp(4, 'ulysses')")
    assert {tips(root)[f"rank {rank}"] for rank in range(4)} == {3}
    assert said(root).count("all-to-all") == 2
    assert "3/4 of it leaves" in said(root)


def test_experts_are_dealt_out_in_order_and_everybody_sends_to_everybody() -> None:
    root = drawn("ep(3)")
    words = said(root)
    assert [
        part for part in ("0 to E/3 - 1", "E/3 to 2E/3 - 1", "2E/3 to E - 1") if f"experts {part}" not in words
    ] == []
    assert len(list(root.iter(f"{SVG}polygon"))) == 2 * 3 * 3


@pytest.mark.parametrize(("zero", "bytes_a_parameter"), [(0, 16), (1, 10), (2, 7), (3, 4)])
def test_memory_bars_follow_the_stage_of_zero(zero: int, bytes_a_parameter: int) -> None:
    assert sum(held_bytes(dp(4, zero=zero)).values()) == bytes_a_parameter
    root = drawn(f"dp(4, zero={zero})")
    assert said(root).count(f"{bytes_a_parameter} bytes a parameter") == 4
    wide = {
        rect.findtext(f"{SVG}title", ""): float(rect.attrib["width"])
        for rect in root.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    }
    per_byte = wide["parameters of rank 0"] / held_bytes(dp(4, zero=zero))["parameters"]
    for what, size in held_bytes(dp(4, zero=zero)).items():
        assert wide[f"{what} of rank 3"] == pytest.approx(size * per_byte, abs=0.1)


@pytest.mark.parametrize("level", ["sync=asp()", "sync=local(8)", "compress=topk(0.01)", "via=ps(2)"])
def test_where_replicas_do_not_all_reduce_no_bytes_are_claimed(level: str) -> None:
    words = said(drawn(f"dp(4, {level})"))
    assert "bytes a parameter" not in words
    assert "Four replicas each take a quarter of the batch" in words


def test_a_product_has_a_panel_for_each_axis() -> None:
    words = said(drawn("dp(2) * dp(3, zero=2) * pp(2) * cp(3) * tp(2) * ep(2) * recompute('full')"))
    lines = words.splitlines()
    assert [line for line in ("dp(2)", "dp(3, zero=2)", "cp(3)", "tp(2)", "ep(2)") if line not in lines] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serial", ["no axis with a picture", "dp, pp, tp, cp, ep and spatial"]),
        ("tp(1) * dp(1)", ["at least two ranks"]),
        (f"tp({MOST_RANKS + 1})", [f"at most {MOST_RANKS}", "fewer ranks"]),
        ("dp(2) * dp(1000000)", ["dp(1000000)", "1,000,000 ranks"]),
    ],
)
def test_what_cannot_be_drawn_is_explained(text: str, words: list[str]) -> None:
    with pytest.raises(NothingToDraw) as refused:
        picture_svg(parse(text))
    assert [part for part in words if part not in str(refused.value)] == []


@settings(deadline=None)
@given(
    st.sampled_from(
        ["dp({})", "dp({}, zero=3)", "tp({})", "tp({}, batch=True)", "cp({})", "cp({}, 'ulysses')", "ep({})"]
    ),
    st.integers(2, MOST_RANKS),
)
def test_everything_lies_inside_the_frame(form: str, ranks: int) -> None:
    root = drawn(form.format(ranks))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            assert float(rect.attrib["x"]) >= 0
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height
    for element in root.iter(f"{SVG}text"):
        assert float(element.attrib.get("y", 0)) <= height


@pytest.mark.long
@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_words_leave_a_drawing_well_formed(text: str) -> None:
    drawing = Drawing()
    drawing.words(0, 10, text + "<&>'\"\x00\ud800")
    drawing.box(0, 0, 1, 1, fill="none", tip=text + "<&>")
    svg = drawing.document(text + "<&>")
    shown = ElementTree.fromstring(svg.encode("utf-8")).findtext(f"{SVG}text")
    assert shown is not None
    assert shown.endswith("<&>'\"")


def test_neighbours_have_different_colours() -> None:
    assert all(rank_colour(rank) != rank_colour(rank + 1) for rank in range(40))


def test_the_drawing_refers_to_nothing_outside() -> None:
    svg = picture_svg(parse("dp(2, zero=1) * cp(2) * tp(2) * ep(2)"))
    assert set(re.findall(r"https?://[^'\"]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "href" not in svg


@pytest.mark.parametrize("page", ["data.md", "tensor.md", "context.md", "experts.md"])
def test_the_pictures_in_the_documentation_are_what_the_command_beside_them_draws(page: str) -> None:
    words = (DOCS / page).read_text(encoding="utf-8")
    commands = re.findall(r'^`shoal explain "(.+?)" --picture (\S+)`', words, re.MULTILINE)
    assert commands
    assert [file for _, file in commands] == re.findall(r"\(pictures/(\S+)\)", words)
    for text, file in commands:
        assert (DOCS / "pictures" / file).read_text(encoding="utf-8") == picture_svg(parse(text))


@pytest.mark.parametrize("text", ["pp(3)", "pp(2, 'interleaved', micro=4, chunks=2) * dp(2)"])
def test_a_pipeline_is_drawn_with_all_of_its_stages(text: str) -> None:
    drawn = picture_svg(parse(text))
    pipeline = parse(text).term(pp)
    stages = pipeline.n * pipeline.chunks
    assert all(f"stage {stage} of {stages}" in drawn for stage in range(stages))
