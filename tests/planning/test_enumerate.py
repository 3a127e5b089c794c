"""Rows are what the algebra calls legal, each once, and read back to the expressions they print."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import cluster
from shoal.estimate.cost.inputs import RECOMPUTE, SCHEDULES
from shoal.planning.candidates import COLUMNS, COMPRESSORS, ORDERS, Candidates, of_strategies
from shoal.planning.counterfactual import with_links
from shoal.planning.enumerate import compressed, enumerate_legal
from shoal.planning.legal import facts_of, legal
from shoal.planning.price import price_candidates
from shoal.planning.rank import make_plan, question_for
from shoal.shapes.presets import preset
from shoal.shapes.shape import Transformer
from shoal.strategy import ModelFacts, is_legal, local, parse

SMALL = Transformer(layers=6, hidden=48, heads=12, kv_heads=6, vocab=100, sequence=1024, tied=False)

FACTS = st.builds(
    ModelFacts,
    layers=st.sampled_from([None, 1, 4, 7]),
    heads=st.sampled_from([None, 4, 6]),
    kv_heads=st.sampled_from([None, 2]),
    hidden=st.sampled_from([None, 24]),
    sequence=st.sampled_from([None, 12, 64]),
    experts=st.sampled_from([None, 0, 4]),
    global_batch=st.sampled_from([None, 12, 48, 64]),
    tied=st.sampled_from([None, True, False]),
    clips=st.sampled_from([None, True, False]),
    elementwise_optimizer=st.sampled_from([None, True, False]),
    coupled_optimizer=st.sampled_from([None, True, False]),
    sequence_why=st.sampled_from(["", "", "a mean over tokens"]),
    sequence_under_cp_why=st.sampled_from(["", "", "tp begins before cp"]),
    context_why=st.sampled_from(["", "", "a convolution over tokens"]),
    context_in_stages_why=st.sampled_from(["", "", "the model adds to the sequence itself"]),
    tensor_parts=st.sampled_from([None, None, (), (("a", "heads", 6), ("b", "features", 12)), (("c", "words", 0),)]),
)
SIZES = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def raw_rows(draw: st.DrawFn) -> Candidates:
    """Any row of the space, legal or not."""
    size = 12
    column = lambda values: np.array(draw(st.lists(values, min_size=size, max_size=size)))
    values = {
        **{axis: column(SIZES) for axis in ("outer", "dp", "ep", "tp", "cp", "pp")},
        "zero": column(st.integers(0, 3)),
        "sequence": column(st.integers(0, 1)),
        "ulysses": column(st.integers(0, 1)),
        "micro": column(st.sampled_from([1, 2, 3, 4, 6])),
        "schedule": column(st.integers(1, len(SCHEDULES) - 1)),
        "chunks": column(st.sampled_from([1, 1, 2, 3])),
        "recompute": column(st.integers(0, len(RECOMPUTE) - 1)),
        "order": column(st.integers(0, len(ORDERS) - 1)),
        "compress": column(st.integers(0, len(COMPRESSORS) - 1)),
        "local": column(st.sampled_from([0, 0, 1, 4])),
    }
    return Candidates(**values, global_batch=48, sync=local(1))


@pytest.mark.parametrize("code", range(len(COMPRESSORS)))
@pytest.mark.parametrize("inner", [1, 2])
def test_masks_know_what_each_compressor_needs(code: int, inner: int) -> None:
    values = dict.fromkeys(COLUMNS, 0) | dict.fromkeys(("tp", "cp", "pp", "ep", "micro", "schedule", "chunks"), 1)
    values |= {"outer": 2, "dp": inner, "compress": code}
    columns = {name: np.array([value]) for name, value in values.items()}
    rows = Candidates(**columns, global_batch=48, sync=local(1))
    world, strategy = 2 * inner, rows.strategy(0)
    assert bool(legal(rows, world=world, facts=ModelFacts())[0]) == is_legal(strategy, world=world, facts=ModelFacts())


@pytest.mark.long
@given(rows=raw_rows(), facts=FACTS, world=st.sampled_from([1, 2, 4, 8, 12, 16]))
@settings(max_examples=120, deadline=None)
def test_masks_say_what_is_legal_says_both_ways(rows: Candidates, facts: ModelFacts, world: int) -> None:
    for given_world in (world, int(rows.world[0])):
        mask = legal(rows, world=given_world, facts=facts)
        for row in range(len(rows)):
            strategy = rows.strategy(row)
            assert bool(mask[row]) == is_legal(strategy, world=given_world, facts=facts), str(strategy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world", "node"), [("gpt2:small", 8, 8), ("llama3:8b", 32, 8), ("mixtral:8x7b", 16, 4)]
)
def test_every_enumerated_row_is_legal_and_none_stands_twice(name: str, world: int, node: int) -> None:
    facts = facts_of(preset(name), global_batch=64)
    rows = enumerate_legal(world=world, facts=facts, node=node)
    chosen = np.random.default_rng(0).choice(len(rows), size=min(400, len(rows)), replace=False)
    for row in chosen:
        assert is_legal(rows.strategy(int(row)), world=world, facts=facts)
    whole = np.stack([getattr(rows, name) for name in COLUMNS])
    assert np.unique(whole, axis=1).shape[1] == len(rows)
    texts = [str(rows.strategy(int(row))) for row in range(0, len(rows), max(1, len(rows) // 3000))]
    assert len(set(texts)) == len(texts)


def test_the_space_holds_every_factorisation_of_a_small_world() -> None:
    facts = facts_of(SMALL, global_batch=24)
    rows = enumerate_legal(world=12, facts=facts, node=4)
    found = {
        tuple(int(getattr(rows, a)[i]) for a in ("dp", "tp", "pp", "cp"))
        for i in range(len(rows))
        if rows.outer[i] == 1
    }
    expected = {
        (d, t, p, c)
        for d in range(1, 13)
        for t in (1, 2, 3, 6)
        for p in range(1, 7)
        for c in (1, 2, 4)
        if d * t * p * c == 12
    }
    assert found == expected


def test_hybrid_shards_stay_inside_whole_nodes() -> None:
    rows = enumerate_legal(world=32, facts=facts_of(preset("gpt2:small"), global_batch=64), node=8)
    outer = rows.rows(rows.outer > 1)
    assert len(outer)
    assert (outer.zero == 3).all()
    assert ((32 // outer.outer) % 8 == 0).all()


def test_compressed_rows_are_legal_and_move_dp_between_nodes_outside() -> None:
    facts = facts_of(preset("gpt2:small"), global_batch=64)
    rows = enumerate_legal(world=16, facts=facts, node=4)
    found = compressed(rows, node=4)
    assert len(found)
    assert (found.compress > 0).all()
    assert (found.world == 16).all()
    for row in range(0, len(found), max(1, len(found) // 200)):
        assert is_legal(found.strategy(row), world=16, facts=facts)


def test_local_steps_are_planned_where_they_are_asked_for() -> None:
    shape, slow = preset("gpt2:medium"), with_links(cluster("dgx-a100", devices=16), 0.01, level=1)
    question = question_for(shape, slow, global_batch=64)
    plain, asked = make_plan(question), make_plan(replace(question, sync=local(8)))
    assert not plain.priced.rows.local.any()
    rows = asked.priced.rows
    first, dense = (
        next(int(row) for row in asked.ranked if here[row])
        for here in (rows.local == 8, (rows.local == 0) & (rows.compress == 0))
    )
    assert asked.time_s(first) < asked.time_s(dense)
    assert asked.steps(first) > asked.steps(dense)
    local_rows = rows.rows(rows.local > 0)
    for row in range(0, len(local_rows), max(1, len(local_rows) // 100)):
        assert is_legal(local_rows.strategy(row), world=16, facts=question.model_facts)


def test_an_average_is_shared_among_the_steps_of_its_period() -> None:
    shape, place = preset("gpt2:medium"), cluster("dgx-a100", devices=16)
    texts = ["dp(2, sync=local({}))" + inner for inner in (" * dp(8)", " * dp(8, zero=1)", " * tp(8)")]
    for text in texts:
        rows = of_strategies([parse(text.format(h)) for h in (1, 2, 8, 10**9)], global_batch=64)
        data_s = price_candidates(rows, shape=shape, cluster=place, everything=True).split_s["data"]
        parts = data_s[:-1] - data_s[-1]
        assert parts == pytest.approx(parts[0] / np.array([1, 2, 8]), rel=1e-6), text


@pytest.mark.parametrize(
    "text",
    [
        "serial",
        'dp(8, zero=1) * tp(2, sequence=True) * amp("bf16")',
        'pp(4, "interleaved", micro=8, chunks=2) * dp(2, zero=2) * tp(2) * recompute("full")',
        "dp(4, compress=topk(0.01)) * dp(2, zero=1)",
        "dp(2) * pp(2, micro=4) * dp(4, zero=3) * cp(2)",
        "dp(2) * ep(4) * accumulate(2)",
        'dp(2) * cp(4, "ulysses") * tp(2)',
        "dp(4, sync=local(8)) * dp(2, zero=1)",
        "dp(4, sync=local(8)) * tp(2)",
        "dp(4, sync=local(8), compress=int8()) * tp(2)",
    ],
)
def test_expressions_become_rows_and_come_back(text: str) -> None:
    assert of_strategies([parse(text)], global_batch=64).strategy(0) == parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "spatial(2)",
        "dp(2, sync=ssp(4))",
        "dp(2, via=ps(1))",
        "dp(2, compress=gtopk(0.01))",
        "dp(2) * dp(2, sync=local(4))",
    ],
)
def test_what_has_no_price_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="no estimate for"):
        of_strategies([parse(text)], global_batch=64)
