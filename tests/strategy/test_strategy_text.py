"""Text becomes a strategy or a StrategyError that points at the place; never anything else."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.strategy import (
    REGISTRY,
    Strategy,
    StrategyError,
    amp,
    diloco,
    dp,
    fp16,
    gossip,
    parse,
    pp,
    serial,
    topk,
    tp,
)
from strategy.strategies import strategies


@pytest.mark.long
@given(strategies())
@settings(max_examples=300)
def test_every_strategy_reads_back_from_its_text(strategy: Strategy) -> None:
    assert parse(str(strategy)) == strategy
    assert str(parse(str(strategy))) == str(strategy)


@given(strategies())
def test_the_repr_names_every_term(strategy: Strategy) -> None:
    assert repr(strategy).startswith("Strategy(")
    assert all(str(term) in repr(strategy) for term in strategy.terms)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("serial", serial),
        ("serial()", serial),
        ("serial * dp(2)", Strategy(dp(2))),
        ("dp(8, zero=1) * tp(2)", dp(8, zero=1) * tp(2)),
        ("dp(n=8)", Strategy(dp(8))),
        ("dp(2, compress=fp16)", Strategy(dp(2, compress=fp16()))),
        ("dp(2, compress=fp16())", Strategy(dp(2, compress=fp16()))),
        ("  dp(2)\n  * tp(2)\r\n\t* amp('bf16')  ", dp(2) * tp(2) * amp("bf16")),
        ("(dp(2) * tp(2)) * (amp('bf16'))", dp(2) * tp(2) * amp("bf16")),
        ("dp(0x10)", Strategy(dp(16))),
        ("dp(1_000)", Strategy(dp(1000))),
        ("dp(+2)", Strategy(dp(2))),
        ("dp(2, compress=topk(1))", Strategy(dp(2, compress=topk(1.0)))),
        ("dp(2, compress=topk(1e-30))", Strategy(dp(2, compress=topk(1e-30)))),
        ('dp(4, sync=gossip("ring", "async"))', Strategy(dp(4, sync=gossip("ring", "async")))),
        (
            'dp(4, sync=diloco(50)) * pp(2, "1f1b", micro=8) * dp(4, zero=3) * tp(2)',
            dp(4, sync=diloco(50)) * pp(2, "1f1b", micro=8) * dp(4, zero=3) * tp(2),
        ),
    ],
)
def test_text_and_code_say_the_same(text: str, expected: Strategy) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (serial, "serial"),
        (Strategy(dp(1)), "dp(1)"),
        (Strategy(pp(4, "1f1b", micro=4, chunks=1)), "pp(4)"),
        (Strategy(pp(4, micro=8)), "pp(4, micro=8)"),
        (Strategy(pp(4, "gpipe")), 'pp(4, "gpipe")'),
        (Strategy(dp(2, compress=fp16())), "dp(2, compress=fp16())"),
        (amp("bf16") * dp(2), 'dp(2) * amp("bf16")'),
    ],
)
def test_the_text_is_canonical_and_leaves_defaults_out(strategy: Strategy, text: str) -> None:
    assert str(strategy) == text


# Each wrong text with the part that the caret must stand under, and words that the message must hold.
WRONG = [
    ("", "", ["empty"]),
    (" \n ", "", ["empty"]),
    ("dp(8) * tq(2)", "tq", ["no term tq", "Did you mean tp?"]),
    ("dp(8, zer=1)", "zer=1", ["no argument zer", "Did you mean zero?"]),
    ("dp(8, 1)", "1", ["without a name", "zero="]),
    ("dp(True)", "True", ["True"]),
    ("dp(-1)", "-1", ["-1", "at least 1"]),
    ("dp(0)", "0", ["at least 1"]),
    ("dp(2.5)", "2.5", ["whole number"]),
    ("dp(1e999)", "1e999", ["inf"]),
    ("dp(2j)", "2j", ["2j"]),
    ("dp(b'2')", "b'2'", ["b'2'"]),
    ("dp(None)", "None", ["None"]),
    ("dp(...)", "...", ["no value"]),
    ("tp(2) * dp(2, zero=9)", "9", ["0 to 3"]),
    ("pp(2, 1f1b, micro=4)", "1f1b", ["1f1b is a word here, and words (schedules", 'Did you mean "1f1b"?']),
    ("pp(2, schedule=1f1b)", "1f1b", ["need quotes", 'Did you mean "1f1b"?']),
    ("pp(2, zero-bubble, micro=4)", "zero-bubble", ["need quotes", 'Did you mean "zero-bubble"?']),
    ('pp(2, "1f1bb")', '"1f1bb"', ['Did you mean "1f1b"?']),
    ("cp(2, ring)", "ring", ['Did you mean "ring"?']),
    ("asp() * dp(2)", "asp()", ["sync=asp()"]),
    ("dp(2) * topk(0.1)", "topk(0.1)", ["compress=topk(0.1)"]),
    ("dp(2, sync=topk(0.1))", "topk(0.1)", ["compress=topk(0.1)"]),
    ("dp(2, sync=tp(2))", "tp(2)", ["axis"]),
    ("dp(2, sync=sspp(3))", "sspp", ["Did you mean ssp?"]),
    ("dp(2, compress=topk)", "topk", ["topk needs r", "topk(0.01)"]),
    ("dp(2, compress=topk(2))", "2))", ["at most 1"]),
    ("dp(2) + tp(2)", "+", ["multiply", "Did you mean *?"]),
    ("(dp(2)) @ (tp(2))", "@", ["multiply"]),
    ("dp(2) ** tp(2)", "**", ["multiply"]),
    ("dp(2) // tp(2)", "//", ["multiply"]),
    ("dp(2), tp(2)", "dp(2), tp(2)", ["*"]),
    ("[dp(2)]", "[dp(2)]", ["*"]),
    ("dp(2) tp(2)", "tp(2)", ["joined by *"]),
    ("tp(2) * tp(3)", "tp(3)", ["twice"]),
    ('dp(2) * amp("bf16") * amp("bf16")', None, ["twice"]),
    ("dp(2, zero=1, zero=2)", "zero=2", ["twice"]),
    ("dp(2, n=3)", "3", ["twice"]),
    ("dp(2, **x)", "**x", ["one by one"]),
    ("dp(*x)", "*x", ["one by one"]),
    ("dp", "dp", ["needs n", "dp(2)"]),
    ("x.y(2)", "x.y", ["plain name"]),
    ("dp(2)(3)", "dp(2)", ["plain name"]),
    ("lambda: dp(2)", "lambda", ["no place"]),
    ("dp(2) if 1 else tp(2)", "dp(2) if", ["no place"]),
    ("dp(n := 2)", "n := 2", ["no value"]),
    ("dp(1 + 1)", "1 + 1", ["no value"]),
    ("[x for x in y]", "[x", ["no place"]),
    ("dp(f'2')", "f'2'", ["no value"]),
    ("__import__('os')", "__import__", ["no term"]),
    ("dp(2", "(2", ["parenthesis missing"]),
    ("dp(2))", ")", ["unmatched"]),
    ("dp(2)) * (tp(2)", None, ["unmatched"]),
    ("2", "2", ["term was expected"]),
    ("dp(2) # eight", "#", ["no place"]),
    ("dp(2) \\", "\\", ["no place"]),
    ("dp(2)\x00", "\x00", ["no place"]),
    ("\ud800", "\ud800", ["no place"]),
    ("dp(2) = 3", None, []),
    ("dp(2);", None, []),
    ("import os", None, []),
]


@pytest.mark.parametrize(("text", "under", "words"), WRONG, ids=[repr(text) for text, _, _ in WRONG])
def test_an_error_points_at_the_place_and_names_what_is_right(text: str, under: str | None, words: list[str]) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    error = caught.value
    assert isinstance(error, ValueError)
    shown = str(error)
    for word in words:
        assert word in shown
    if under:
        assert error.column == text.rindex(under)
        assert shown.splitlines()[2].index("^") == len("  ") + text.rindex(under)


@pytest.mark.parametrize(
    ("text", "line", "carets"),
    [
        ("dp(8) * tq(2)", "  dp(8) * tq(2)", "          ^^"),
        ("   tq(2)", "     tq(2)", "     ^^"),
        ("dp(2)\n  * tq(2)\n  * amp('bf16')", "    * tq(2)", "      ^^"),
        ("dp(2)\r\n* tq(2)", "  * tq(2)", "    ^^"),
        # Letters of several bytes: the syntax tree counts bytes, the caret counts columns.
        ('cp(2, "é") * tp(2)', '  cp(2, "é") * tp(2)', "        ^^^"),
        ("tp(2, é=1) * tq(2)", "  tp(2, é=1) * tq(2)", "        ^^^"),
        ("dp(2, é=tq)", "  dp(2, é=tq)", "        ^^^^"),
        # Wide characters take two columns of a terminal.
        ('cp("日本", "ring")', '  cp("日本", "ring")', "     ^^^^^^"),
        ("dp(日本=1, zer=2)", "  dp(日本=1, zer=2)", "     ^^^^^^"),
    ],
)
def test_the_caret_stands_under_the_exact_columns(text: str, line: str, carets: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert str(caught.value).splitlines()[1:] == [line, carets]


def test_the_error_carries_its_parts() -> None:
    with pytest.raises(StrategyError) as caught:
        parse("dp(2) *\n tq(2)")
    error = caught.value
    assert error.text == "dp(2) *\n tq(2)"
    assert error.text[error.column : error.column + error.length] == "tq"
    assert error.suggestion == "tp"
    assert "tq" in error.message
    import pickle

    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


@pytest.mark.parametrize(
    "text",
    [
        "(" * 4000,
        "(" * 90 + "dp(2)" + ")" * 90 + " + tp(2)",
        "-" * 4000 + "1",
        "dp(" * 300 + "2" + ")" * 300,
        "dp(2)*" * 600 + "tp(2)",
        "dp(" + "9" * 4000 + ")",
        "dp(" + "9" * 100_000 + ")",
        "not " * 900 + "dp",
        "[" * 1000 + "]" * 1000,
        "dp(2) if " * 400 + "1",
        "a." * 2000 + "b",
        " " * 100_000,
        "é" * 4096,
        "x" * 10_000_000,
    ],
    ids=lambda text: f"{text[:12]}...{len(text)}",
)
def test_long_and_deep_texts_are_refused_quickly(text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text)
    assert len(str(caught.value)) < 1000


def test_only_text_is_read() -> None:
    with pytest.raises(TypeError, match="string"):
        parse(b"dp(2)")  # type: ignore[arg-type]


@given(st.text(max_size=60))
@example("dp(2)\f*tp(2)")
@example("'\\N{DASH}'")
@settings(max_examples=400)
def test_arbitrary_text_raises_nothing_but_a_strategy_error(text: str) -> None:
    _read_or_refuse(text)


SIGNS = [
    *"()*+,=':.[]{}#\\é日2 \n",
    "**",
    "-1",
    "0.5",
    "1e400",
    "True",
    "None",
    "lambda",
    "n",
    "f'",
    '"',
    '"ring"',
]
NAMES = [*REGISTRY, "serial", "zero", "sync", "via", "compress"]
PIECES = st.sampled_from([*NAMES, *SIGNS])


@given(st.lists(PIECES, max_size=25))
@settings(max_examples=400)
def test_any_mixture_of_the_pieces_raises_nothing_but_a_strategy_error(pieces: list[str]) -> None:
    _read_or_refuse("".join(pieces))


@pytest.mark.long
@given(strategies(), st.data())
@settings(max_examples=300)
def test_a_damaged_strategy_raises_nothing_but_a_strategy_error(strategy: Strategy, data: st.DataObject) -> None:
    text = str(strategy)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 4, len(text))))
    _read_or_refuse(text[:start] + data.draw(st.text(max_size=3) | PIECES) + text[end:])


def _read_or_refuse(text: str) -> None:
    refused = None
    try:
        strategy = parse(text)
    except StrategyError as error:
        refused = error
    if refused is None:
        assert parse(str(strategy)) == strategy
        return
    assert 0 <= refused.column <= len(text)
    assert str(refused)
    if text.strip():
        assert "^" in str(refused)


def test_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the text was evaluated")

    monkeypatch.setattr(builtins, "eval", refuse)
    monkeypatch.setattr(builtins, "exec", refuse)
    assert parse("dp(2) * tp(2)") == dp(2) * tp(2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp(2, compress=zzz(0.1))", "there is no term zzz; compress takes one of none, "),
        ("dp(2, sync=zzz)", "there is no term zzz; sync takes one of bsp"),
        ("zzz(2)", "there is no term zzz; the axes are dp"),
    ],
)
def test_a_misspelt_term_is_answered_with_the_names_of_its_own_family(text: str, said: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(said)):
        parse(text)
