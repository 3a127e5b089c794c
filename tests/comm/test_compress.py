"""Compression in one process: what is sent and what is kept are the gradient, and learning gets where it should."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from comm.compressors import ALL, FEEDBACK, LOSSY, term_of
from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.given import CompressError, Draw, Over, State
from shoal.comm.compress.method import Method
from shoal.strategy.terms import compress as terms
from shoal.technique.compress.dgc import warm_up_fraction

DTYPES = (torch.float32, torch.float64)


def draw(step: int = 0, rank: int = 0, key: str = "layer.weight", seed: int = 3) -> Draw:
    return Draw(seed, step, key, rank)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    huge = normal(1025, dtype=dtype)
    huge[77] = -1e30
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return {
        "1025": normal(1025, dtype=dtype),
        "a prime number of elements": normal(1031, seed=1, dtype=dtype),
        "a matrix": normal(33, 65, seed=2, dtype=dtype),
        "a kernel": normal(8, 3, 5, 5, seed=3, dtype=dtype),
        "one element": normal(1, seed=4, dtype=dtype),
        "zeros": torch.zeros(1025, dtype=dtype),
        "one huge element": huge,
        "denormals": (normal(33, 65, seed=5, dtype=torch.float64) * 100).round().to(dtype) * least,
        "all equal": torch.full((40, 30), -0.25, dtype=dtype),
        "as a transpose lies": normal(65, 33, seed=6, dtype=dtype).t(),
    }


def take(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    return state[name].view(like.shape) if name in state else torch.zeros_like(like)


def close(a: torch.Tensor, b: torch.Tensor, scale: float) -> bool:
    """Equal to a few roundings of numbers of this size."""
    finfo = torch.finfo(a.dtype)
    return bool((a - b).abs().max() <= 16 * (finfo.eps * scale + finfo.smallest_normal * finfo.eps))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("term", [t for t in FEEDBACK if not isinstance(t, terms.dgc)], ids=str)
def test_sent_and_residual_are_the_gradient(term: terms.CompressTerm, dtype: torch.dtype) -> None:
    for name, x in gradients(dtype).items():
        assert isinstance(term, Compressor)
        method, state = Method(term), State()
        for step in range(3):
            before, given_x = take(state, "residual", x).clone(), x.clone()
            total = method.reduce(x, state, Over(), draw(step))
            assert total.shape == x.shape
            assert total.dtype == dtype
            assert torch.equal(x, given_x), "the gradient was changed"
            value = torch.add(x, before, alpha=term.memory())
            scale = max(float(value.abs().max()), float(total.abs().max()))
            assert close(total + take(state, "residual", x), value, scale), (name, step)


@pytest.mark.parametrize(
    ("term", "count"),
    [
        (terms.topk(0.01), 20),
        (terms.mstopk(0.01), 20),
        (terms.randomk(0.01), 20),
        (terms.gtopk(0.01), 20),
        (terms.sketch(3, 64), 16),
    ],
    ids=str,
)
def test_sparse_methods_send_so_many_elements_unchanged(term: terms.CompressTerm, count: int) -> None:
    x, state = normal(40, 50), State()
    total = Method(term).reduce(x, state, Over(), draw())
    chosen = total != 0
    assert chosen.sum() == count
    assert torch.equal(total[chosen], x[chosen])
    assert torch.equal(state["residual"].view_as(x), torch.where(chosen, 0.0, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dgc_sends_what_a_plain_loop_sends(dtype: torch.dtype) -> None:
    x_of = [normal(30, 50, seed=step, dtype=dtype) for step in range(60)]
    method, state = Method(terms.dgc(0.02), clip=30.0), State()
    velocity = torch.zeros(1500, dtype=dtype)
    accumulated = torch.zeros(1500, dtype=dtype)
    for step, x in enumerate(x_of):
        norm = x.double().norm().item()
        flat = x.view(-1) * (30.0 / norm if norm > 30.0 else 1.0)
        velocity = 0.9 * velocity + flat
        accumulated = accumulated + velocity
        count = {0: 375, 1: 94, 2: 30}[step // 25]
        chosen = accumulated.abs().topk(count).indices
        expected = torch.zeros_like(flat)
        expected[chosen] = accumulated[chosen]
        accumulated[chosen] = 0
        velocity[chosen] = 0
        total = method.reduce(x, state, Over(), draw(step)).view(-1)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state["residual"], accumulated, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state["velocity"], velocity, rtol=1e-5, atol=1e-5)


def test_dgc_sends_and_keeps_all_of_the_accumulated_momentum() -> None:
    for name, x in gradients(torch.float64).items():
        method, state = Method(terms.dgc(0.01)), State()
        for step in range(3):
            before, velocity = take(state, "residual", x).clone(), take(state, "velocity", x).clone()
            total = method.reduce(x, state, Over(), draw(step))
            value = before + 0.9 * velocity + x
            scale = float(value.abs().max())
            assert close(total + take(state, "residual", x), value, scale), name


def test_dgc_clips_each_rank_so_that_independent_parts_sum_to_the_bound() -> None:
    x = normal(1000)
    four_ranks = Over(group=object(), size=4)  # type: ignore[arg-type]
    _, kept = terms.dgc(0.1).take_up(x, {}, four_ranks, 3.0)
    torch.testing.assert_close(kept["velocity"], x / x.norm() * 1.5)
    _, kept = terms.dgc(0.1).take_up(x, {}, four_ranks, 300.0)
    assert torch.equal(kept["velocity"], x)


def test_dgc_starts_gently_and_comes_down_to_its_fraction() -> None:
    found = [warm_up_fraction(0.01, step) for step in (0, 24, 25, 50, 75, 100, 10**9)]
    assert found == [0.25, 0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]
    assert warm_up_fraction(0.5, 0) == 0.5


@pytest.mark.parametrize("term", ALL, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_no_number_is_seen_and_leaves_no_trace(term: terms.CompressTerm, bad: float) -> None:
    method, state = Method(term), State()
    method.reduce(normal(33, 65), state, Over(), draw(0))
    before = {name: value.clone() for name, value in state.items()}
    spoilt = normal(33, 65, seed=1)
    # An element that is not among the largest, nor drawn by random-k.
    spoilt[7, 11] = bad
    assert not torch.isfinite(method.reduce(spoilt, state, Over(), draw(1))).all()
    assert {name: value.tolist() for name, value in state.items()} == {n: v.tolist() for n, v in before.items()}
    assert torch.isfinite(method.reduce(normal(33, 65, seed=2), state, Over(), draw(2))).all()


@pytest.mark.parametrize("term", ALL, ids=str)
def test_a_resumed_run_continues_to_the_bit(term: terms.CompressTerm) -> None:
    def run(state: State, steps: range) -> list[list[float]]:
        found = []
        for step in steps:
            found.append(Method(term).reduce(normal(32, 40, seed=step), state, Over(), draw(step)).view(-1).tolist())
        return found

    state = State()
    run(state, range(3))
    saved = {name: value.clone() for name, value in state.items()}
    assert run(state, range(3, 6)) == run(saved, range(3, 6))


def test_what_is_kept_is_flat_and_as_long_as_the_parameter() -> None:
    for term in FEEDBACK:
        state = State()
        Method(term).reduce(normal(33, 65), state, Over(), draw())
        assert set(state) == {*Method(term).keeps, *Method(term).extras}
        assert all(state[name].shape == (33 * 65,) for name in Method(term).keeps)
        if "query" in state:
            assert state["query"].shape == (65, 2)


@pytest.mark.parametrize("term", ALL, ids=str)
def test_an_empty_tensor_is_reduced_to_itself(term: terms.CompressTerm) -> None:
    assert Method(term).reduce(torch.empty(0, 5), {}, Over(), draw()).shape == (0, 5)


def test_a_state_of_another_parameter_is_refused_in_words() -> None:
    with pytest.raises(CompressError, match=r'"residual" has shape \[7\]; expected \[2145\]'):
        Method(terms.topk(0.1)).reduce(normal(33, 65), {"residual": torch.zeros(7)}, Over(), draw())


def test_a_gradient_in_half_precision_is_refused_in_words() -> None:
    with pytest.raises(CompressError, match="expected float32 or float64"):
        Method(terms.sign()).reduce(normal(33, 65).bfloat16(), {}, Over(), draw())


def test_ranks_that_do_not_fit_their_group_are_refused() -> None:
    with pytest.raises(CompressError, match="expected 0 <= rank < size"):
        Over(size=2, rank=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_depend_on_all_that_they_should(dtype: torch.dtype) -> None:
    def shared(given: Draw) -> float:
        return torch.rand(1, generator=given.shared(), dtype=torch.float64).item()

    def own(given: Draw) -> float:
        (chance,) = given.chances(1, torch.empty(0, dtype=dtype))
        assert chance.dtype == dtype
        return float(chance)

    base = draw(step=1, rank=1)
    assert shared(base) == shared(draw(step=1, rank=2))
    assert own(base) == own(base)
    others = [draw(step=2, rank=1), draw(1, 1, key="ü\n\ud800"), draw(1, 1, seed=4), draw(step=1, rank=2)]
    assert len({own(each) for each in [base, *others]}) == 5
    assert len({shared(each) for each in [base, *others]}) == 4
    assert own(base) != shared(base)


def test_small_tensors_vectors_and_what_is_no_smaller_are_left_alone() -> None:
    for term in LOSSY:
        assert not Method(term).pays((100_000,), 4)
        assert not Method(term).pays((31, 33), 4)
        assert not Method(term).pays((0, 33), 4)
    paying = [str(term) for term in ALL if Method(term).pays((256, 256), 4)]
    assert paying == [str(term) for term in LOSSY]
    assert not Method(terms.topk(0.5)).pays((256, 256), 4)
    assert Method(terms.topk(0.5)).pays((256, 256), 8)
    assert not Method(terms.powersgd(128)).pays((256, 256), 4)
    assert not Method(terms.sketch(5, 20_000)).pays((256, 256), 4)
    # Gathered from many ranks, codes outgrow the sum that a ring would send.
    assert Method(terms.int8()).pays((256, 256), 4, ranks=7)
    assert not Method(terms.int8()).pays((256, 256), 4, ranks=8)


def test_one_rank_sends_nothing() -> None:
    for term in ALL:
        if not term.sized_by_data:
            assert Method(term).sent_bytes((64, 64), 4, 1, 0) == []


@pytest.mark.processes
def test_predictions_need_no_torch() -> None:
    code = "import sys, shoal.comm.compress.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def quadratic(method: Method, *, steps: int, rate: float) -> float:
    """The distance to the optimum, of the distance at the start."""
    curvature = torch.linspace(0.5, 1.0, 32 * 40, dtype=torch.float64).view(32, 40)
    best = normal(32, 40, dtype=torch.float64)
    at, state = torch.zeros_like(best), State()
    for step in range(steps):
        at = at - rate * method.reduce(curvature * (at - best), state, Over(), draw(step))
    return float((at - best).norm() / best.norm())


RATES = {
    "int8": ("int8()", 0.5),
    "topk": ("topk(0.1)", 0.2),
    "mstopk": ("mstopk(0.1)", 0.2),
    "hitopk": ("hitopk(0.1)", 0.2),
    "randomk": ("randomk(0.25)", 0.1),
    "threshold": ("threshold(0.01)", 0.2),
    "dgc": ("dgc(0.1)", 0.02),
    "gtopk": ("gtopk(0.1)", 0.2),
    "sketch": ("sketch(3, 400)", 0.1),
    "chunktopk": ("chunktopk(0.1)", 0.2),
    "demo": ("demo(0.1)", 0.2),
    "powersgd": ("powersgd(4)", 0.2),
    "qsgd": ("qsgd(2)", 0.3),
    "fp16": ("fp16()", 0.5),
}
"""Where another rate than 0.2, or another term than that of the other tests, is needed."""


@pytest.mark.parametrize("term", LOSSY, ids=str)
def test_200_steps_come_to_the_optimum(term: terms.CompressTerm) -> None:
    text, rate = RATES.get(type(term).__name__, (str(term), 0.2))
    assert quadratic(Method(term_of(text)), steps=200, rate=rate) < 0.02
