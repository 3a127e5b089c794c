"""Training with `compress=`: the way of gradients is exact but for what a method leaves out, what is left out is kept,
and all of it survives a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comm.compressors import term_of, written
from shoal.checkpoint.save import latest
from shoal.comm.compress.method import Method
from shoal.parallel.runnable import cannot_run
from shoal.proof.certify import EXACT
from shoal.strategy import parse

Ranks = Callable[..., list[Any]]

FOLDER = Path(__file__).parent / "jobs"
LANGUAGE, TIED, MOE = (f"{FOLDER / 'uneven.py'}:{name}" for name in ("language", "language_tied", "mixtral"))

METHODS = [
    text
    for text in written(
        "feedback",
        sketch="sketch(3, 500)",
        powersgd="powersgd(2)",
        chunktopk="chunktopk(0.03, decay=1.0)",
        demo="demo(0.03, decay=1.0)",
    )
    if Method(term_of(text)).keeps == ("residual",) and not term_of(text).between_groups
]
"""Those that keep what they do not send, and nothing else; all of it, where a method may forget some."""

TWO = ["dp(2, C)", "dp(2, zero=1, C)", "dp(2, zero=2, C)", "dp(2, zero=3, C)", "dp(2, zero=1, C) * accumulate(2)"]
FOUR = [
    "dp(2, C) * dp(2)",
    "dp(2, C) * dp(2, zero=1)",
    "dp(2, C) * dp(2, zero=2)",
    "dp(2, C) * dp(2, zero=3)",
    "dp(2) * dp(2, C)",
    "dp(2) * dp(2, zero=1, C)",
    "dp(2, C) * tp(2)",
    "dp(2, C) * tp(2, sequence=True)",
    "dp(2, C) * pp(2, micro=2)",
    "pp(2, micro=3) * dp(2, C)",
    "dp(2, C) * cp(2)",
    "dp(2, C) * dp(2, via=shared())",
    "dp(2, zero=2, C) * dp(2) * accumulate(2)",
    'dp(4, via=allreduce("hierarchical"), C)',
    'dp(4, C) * recompute("full")',
]


def compressed(strategies: list[str], method: str = "fp16()") -> list[str]:
    return [text.replace("C)", f"compress={method})") for text in strategies]


def prove(ranks: Ranks, job: str, strategies: list[str], *, number: int, steps: int = 4, **more: Any) -> None:
    asked = {"cases": [(job, text) for text in compressed(strategies)], "steps": steps, **more}
    found = ranks("distributed.compressed_targets:prove_lossless", asked, ranks=number, timeout_s=200)
    for rows in zip(*found, strict=True):
        for row in rows:
            assert row["difference"] <= EXACT, row
            assert row["ledger"] == [], row["case"]


@pytest.mark.timeout(240)
def test_where_nothing_is_left_out_training_is_exact_on_two_and_three_ranks(ranks: Ranks) -> None:
    prove(ranks, LANGUAGE, TWO, number=2)
    prove(ranks, LANGUAGE, ["dp(3, C)", "dp(3, zero=1, C)", "dp(3, C) * accumulate(2)"], number=3)


@pytest.mark.timeout(240)
def test_where_nothing_is_left_out_products_are_exact(ranks: Ranks) -> None:
    prove(ranks, LANGUAGE, FOUR, number=4, per_host=2)


@pytest.mark.timeout(240)
def test_where_nothing_is_left_out_tied_weights_and_experts_are_exact(ranks: Ranks) -> None:
    prove(ranks, TIED, ["dp(2, C) * pp(2, micro=2)", "dp(2, C) * tp(2)"], number=4)
    prove(ranks, MOE, ["dp(2, C) * ep(2)", "dp(2, C) * dp(2, zero=1)"], number=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_where_nothing_is_left_out_eight_ranks_are_exact(ranks: Ranks) -> None:
    prove(
        ranks,
        LANGUAGE,
        [
            "dp(2, C) * dp(2) * tp(2)",
            "dp(2) * dp(2, C) * dp(2, zero=1)",
            "dp(2, C) * pp(2) * tp(2)",
            'dp(4, via=allreduce("hierarchical"), C) * tp(2)',
            "dp(2, C) * dp(2, zero=3) * tp(2)",
        ],
        number=8,
        per_host=4,
    )


def conserved(ranks: Ranks, cases: list[tuple[str, str]], *, number: int) -> None:
    asked = {"cases": [(LANGUAGE, text, plain) for text, plain in cases]}
    found = ranks("distributed.compressed_targets:conserve", asked, ranks=number, timeout_s=200)
    for (text, _), rows in zip(cases, zip(*found, strict=True), strict=True):
        for row in rows:
            assert row["apart"] < 1e-11, f"{text}: what was sent and what was kept are not the gradient: {row}"
            assert row["ledger"] == [], text
            assert min(row["fragments"], row["kept"]) > 0, f"{text}: nothing was compressed"


@pytest.mark.timeout(240)
def test_what_is_sent_and_what_is_kept_make_up_the_gradient_for_every_method(ranks: Ranks) -> None:
    conserved(ranks, [(f"dp(2, compress={method})", "dp(2)") for method in METHODS], number=2)
    conserved(ranks, [(f"dp(3, compress={method})", "dp(3)") for method in METHODS], number=3)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", [pytest.param("topk(0.02)", marks=pytest.mark.slow), "powersgd(2)"])
def test_what_is_sent_and_what_is_kept_make_up_the_gradient_in_products(ranks: Ranks, method: str) -> None:
    plain = [text.replace(", C)", ")") for text in FOUR[:-2]]
    conserved(ranks, list(zip(compressed(FOUR[:-2], method), plain, strict=True)), number=4)


def test_hitopk_is_dense_inside_a_host_and_sparse_between_hosts(ranks: Ranks) -> None:
    conserved(ranks, [("dp(2, compress=hitopk(0.02)) * dp(2)", "dp(4)")], number=4)


@pytest.mark.timeout(240)
def test_a_resumed_run_goes_on_to_the_bit_with_every_method(ranks: Ranks, tmp_path: Path) -> None:
    every = [*METHODS, "fp16()", "qsgd(4)", "ternary()", "dgc(0.01)"]
    cases = [(LANGUAGE, f"dp(2, compress={method})") for method in every]
    cases += [(LANGUAGE, f"dp(2, zero={stage}, compress=powersgd(2))") for stage in (1, 3)]
    asked = {"cases": cases, "folder": str(tmp_path)}
    for found in ranks("distributed.compressed_targets:go_on", asked, ranks=2, timeout_s=200):
        for (_, strategy), (straight, resumed) in zip(cases, found, strict=True):
            assert straight == resumed, strategy


@pytest.mark.timeout(240)
def test_a_resumed_product_goes_on_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    cases = [(LANGUAGE, text) for text in compressed(FOUR[:-2], "powersgd(2)")]
    asked = {"cases": cases, "folder": str(tmp_path)}
    for found in ranks("distributed.compressed_targets:go_on", asked, ranks=4, timeout_s=200):
        for (_, strategy), (straight, resumed) in zip(cases, found, strict=True):
            assert straight == resumed, strategy


@pytest.mark.timeout(240)
def test_errors_reach_other_replicas_with_their_sum_kept(ranks: Ranks, tmp_path: Path) -> None:
    start = {"job": LANGUAGE, "strategy": "dp(2, compress=topk(0.01)) * dp(2)", "folder": str(tmp_path)}
    ranks("distributed.compressed_targets:save_errors", start, ranks=4)
    sums = []
    for strategy in (
        "dp(2, compress=topk(0.01)) * dp(2)",
        "dp(4, compress=topk(0.05))",
        "dp(2, zero=1, compress=sign())",
        "dp(3, compress=mstopk(0.01))",
        "dp(2, compress=topk(0.01)) * tp(2)",
    ):
        asked = {"job": LANGUAGE, "strategy": strategy, "checkpoint": str(latest(tmp_path))}
        found = ranks("distributed.compressed_targets:load_errors", asked, ranks=parse(strategy).world)
        assert all(each == found[0] for each in found)
        sums.append(found[0])
    assert max(map(abs, sums[0].values())) > 1e-3
    for other in sums[1:]:
        assert other == pytest.approx(sums[0], rel=1e-4, abs=1e-7)


def test_what_cannot_run_is_said_in_a_sentence() -> None:
    for text, said in {
        "dp(2, compress=topk(0.1)) * dp(2, compress=fp16())": "compress on the outer one",
        "dp(2, zero=1) * dp(2, compress=fp16())": "zero on a level outside",
        "dp(2, compress=fp16()) * pp(2, 'pipedream')": "pipedream",
    }.items():
        assert said in (cannot_run(parse(text)) or "")
