"""Terms and their products are checked, frozen values."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import technique
from shoal.strategy import (
    REGISTRY,
    Strategy,
    TermError,
    accumulate,
    allreduce,
    amp,
    asp,
    bsp,
    cp,
    diloco,
    dp,
    ensemble,
    ep,
    fp16,
    hogwild,
    none,
    offload,
    pp,
    ps,
    recompute,
    serial,
    shared,
    spatial,
    ssp,
    topk,
    tp,
)
from strategy.strategies import strategies, terms

FAMILIES = ("axis", "modifier", "sync", "via", "compress")

DESIGNED = {
    "axis": "dp pp tp cp ep spatial ensemble",
    "modifier": "recompute amp offload accumulate",
    "sync": "bsp softsync ssp asp hogwild local diloco bmuf elastic gossip",
    "via": "allreduce ps shared",
    "compress": "none fp16 int8 qsgd ternary onebit sign topk randomk threshold dgc mstopk gtopk hitopk "
    "sketch powersgd",
}
"""What the design named. Techniques that are a file each may be more."""


def test_the_closed_list_holds_the_terms_of_the_design_and_files_of_techniques() -> None:
    found = {family: {n for n, t in REGISTRY.items() if t.family == family} for family in FAMILIES}
    for family, names in DESIGNED.items():
        files = {p.stem for p in (Path(technique.__file__).parent / family).glob("[!_]*.py")}
        assert found[family] == {*names.split()} | files


@pytest.mark.parametrize("name", REGISTRY)
def test_every_term_has_words_a_title_and_a_place_it_is_made_for(name: str) -> None:
    cls = REGISTRY[name]
    assert cls.title
    assert cls.where
    assert cls.__doc__
    from shoal.strategy.text import parse

    example = cls.example()
    inside = {"sync": "dp(2, sync={})", "via": "dp(2, via={})", "compress": "dp(2, compress={})"}
    strategy = parse(inside.get(cls.family, "{}").format(example))
    assert strategy.terms[0].words()


@given(st.sampled_from(FAMILIES).flatmap(terms))
def test_equal_arguments_make_equal_terms_with_equal_hashes(term: object) -> None:
    twin = type(term)(**term.values())  # type: ignore[attr-defined]
    assert twin == term
    assert hash(twin) == hash(term)
    assert copy.deepcopy(term) == term
    assert pickle.loads(pickle.dumps(term)) == term  # noqa: S301


@given(st.sampled_from(FAMILIES).flatmap(terms))
def test_terms_say_what_they_do_whatever_their_arguments(term: object) -> None:
    words = term.words()  # type: ignore[attr-defined]
    assert words == words.strip()
    assert len(words) > 10


@given(strategies())
def test_strategies_are_values(strategy: Strategy) -> None:
    twin = Strategy(*strategy.terms)
    assert twin == strategy
    assert hash(twin) == hash(strategy)
    assert len({twin, strategy}) == 1
    assert pickle.loads(pickle.dumps(strategy)) == strategy  # noqa: S301


@given(strategies(), st.randoms())
def test_the_order_of_modifiers_means_nothing_and_the_order_of_axes_is_kept(strategy: Strategy, random) -> None:
    axes = [term for term in strategy.terms if term.family == "axis"]
    modifiers = list(strategy.modifiers)
    mixed = list(axes)
    for modifier in random.sample(modifiers, len(modifiers)):
        mixed.insert(random.randint(0, len(mixed)), modifier)
    assert Strategy(*mixed) == strategy
    assert [axis.term for axis in strategy.axes] == axes


def test_axis_order_is_meaning() -> None:
    assert dp(2) * tp(4) != tp(4) * dp(2)


def test_terms_and_strategies_are_frozen() -> None:
    term, strategy = dp(2), dp(2) * tp(2)
    with pytest.raises(AttributeError, match="frozen"):
        term.n = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del term.n
    with pytest.raises(AttributeError, match="frozen"):
        strategy.terms = ()
    with pytest.raises(AttributeError):
        strategy.new = 1  # type: ignore[attr-defined]


def test_products_build_strategies_from_either_side() -> None:
    product = Strategy(dp(2), tp(2), amp("bf16"))
    assert dp(2) * tp(2) * amp("bf16") == product
    assert dp(2) * (tp(2) * amp("bf16")) == product
    assert serial * dp(2) == Strategy(dp(2)) == dp(2) * serial


def test_a_product_with_anything_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        dp(2) * 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        3 * dp(2)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: dp(0), ["n", "0", "at least 1"]),
        (lambda: dp(True), ["True"]),
        (lambda: dp(2.0), ["2.0"]),
        (lambda: dp("2"), ["'2'"]),
        (lambda: dp(2**40), ["1048576"]),
        (lambda: dp(10**5000), ["more than 40 digits"]),
        (lambda: dp(), ["needs n", "dp(2)"]),
        (lambda: dp(2, 1), ["zero="]),
        (lambda: dp(2, zero=4), ["zero", "0 to 3"]),
        (lambda: dp(2, zero=None), ["zero is None"]),
        (lambda: dp(2, sync=topk(0.1)), ["compress=topk(0.1)"]),
        (lambda: dp(2, sync=tp(2)), ["bsp", "asp"]),
        (lambda: dp(2, compress=topk), ["topk needs r"]),
        (lambda: dp(2, zeros=1), ["zeros", "zero"]),
        (lambda: pp(2, "1f1bb"), ['"1f1b"']),
        (lambda: tp(2, sequence=1), ["True or False"]),
        (lambda: topk(0), ["above 0"]),
        (lambda: topk(1.5), ["at most 1"]),
        (lambda: topk(float("nan")), ["nan"]),
        (lambda: topk("0.1"), ["'0.1'"]),
        (lambda: ssp(-1), ["at least 0"]),
        (lambda: hogwild(1), ["no arguments"]),
        (lambda: tp(2) * tp(2), ["tp", "twice"]),
        (lambda: amp("bf16") * amp("fp16"), ["amp", "twice"]),
        (lambda: offload("optimizer") * offload("optimizer"), ["twice"]),
        (lambda: offload("optimizer") * offload("optimizer", to="disk"), ["twice"]),
        (lambda: dp(2) * asp(), ["sync=asp()"]),
        (lambda: dp(2) * tp, ["tp(2)"]),
        (lambda: Strategy(*[dp(1)] * 9), ["8 levels"]),
        (lambda: Strategy("dp(2)"), ["not a term"]),  # type: ignore[arg-type]
    ],
)
def test_wrong_terms_are_refused_with_what_was_given_and_expected(build, names: list[str]) -> None:
    with pytest.raises(TermError) as caught:
        build()
    for name in names:
        assert name in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_whole_numbers_of_other_libraries_are_taken_as_numbers() -> None:
    class Number:
        def __index__(self) -> int:
            return 4

    term = dp(Number())  # type: ignore[arg-type]
    assert term == dp(4)
    assert type(term.n) is int


def test_a_term_without_required_arguments_may_be_given_as_its_class() -> None:
    assert dp(2, compress=fp16) == dp(2, compress=fp16())  # type: ignore[arg-type]
    assert dp(2, sync=asp) == dp(2, sync=asp())  # type: ignore[arg-type]


def test_defaults_that_follow_from_other_arguments() -> None:
    assert pp(4).micro == 4
    assert pp(4) == pp(4, micro=4)
    assert pp(4).replace(n=8).micro == 8
    assert pp(4, micro=16).replace(n=8).micro == 16
    assert dp(4).via == allreduce()
    assert dp(4, sync=diloco(50)).via == allreduce()
    assert dp(4, sync=hogwild()).via == shared()
    assert dp(4, sync=ssp(3)).via == ps(4, colocated=True)
    assert dp(4, sync=asp(), via=ps(2)).via == ps(2)
    assert (dp(2).sync, dp(2).compress, dp(2).zero) == (bsp(), none(), 0)


def test_the_world_is_the_product_of_the_axes_and_the_dedicated_servers() -> None:
    assert serial.world == 1
    assert (dp(4) * pp(2) * tp(2) * cp(3)).world == 48
    assert Strategy(dp(4, via=ps(2))).world == 6
    assert Strategy(dp(4, via=ps(2, colocated=True))).world == 4
    served = dp(2, sync=diloco(10)) * pp(3) * dp(4, via=ps(2))
    assert (served.workers, served.servers) == (24, 2 * 3 * 2)
    assert served.world == 36


def test_servers_in_two_levels_are_written_out_as_regions() -> None:
    assert dp(8, sync=asp(), via=ps(2, levels=4)) * tp(2) == dp(4, sync=asp(), via=ps(2)) * dp(2) * tp(2)
    assert str(Strategy(dp(4, via=ps(2, levels=4)))) == "dp(4, via=ps(2))"
    assert Strategy(dp(8, via=ps(2, levels=4))).world == 10


def test_axes_are_named_by_level_when_dp_repeats() -> None:
    assert [axis.name for axis in (dp(2) * tp(2)).axes] == ["dp", "tp"]
    axes = (dp(2) * pp(3) * dp(4) * tp(5)).axes
    assert [(axis.name, axis.size) for axis in axes] == [("dp0", 2), ("pp", 3), ("dp1", 4), ("tp", 5)]


def test_a_strategy_answers_for_its_terms() -> None:
    strategy = (
        dp(2)
        * pp(2, micro=6)
        * dp(3, zero=3)
        * ep(4)
        * recompute("full")
        * offload("optimizer")
        * offload("activations")
    )
    assert strategy.dp_levels == (dp(2), dp(3, zero=3))
    assert strategy.data_parallel == 6
    assert strategy.replicas == 24
    assert strategy.micro_batches == 6
    assert strategy.term(recompute) == recompute("full")
    assert strategy.term(amp) is None
    assert strategy.term(tp) is None
    assert len(strategy.all_of(offload)) == 2
    assert (dp(2) * accumulate(4)).micro_batches == 4
    assert Strategy(dp(2)).micro_batches == 1
    assert strategy.replace(strategy.terms[1], None).term(pp) is None


def test_spatial_grids_are_as_square_as_their_size_allows() -> None:
    assert spatial(4).grid == (4, 1)
    assert spatial(4, "width").grid == (1, 4)
    assert spatial(12, "both").grid == (4, 3)
    assert spatial(7, "both").grid == (7, 1)


def test_ensembles_do_not_divide_the_batch() -> None:
    assert (ensemble(3) * dp(2)).replicas == 2
