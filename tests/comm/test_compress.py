"""Codecs and feedbacks in one process: what is sent and kept are the gradient, in the bytes that formulas say."""

from __future__ import annotations

import subprocess
import sys
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from shoal.comm.compress import payload as packing
from shoal.comm.compress import traffic
from shoal.comm.compress.codec import Codec, sparse_parts
from shoal.comm.compress.compressed import Compressed
from shoal.comm.compress.half import Half
from shoal.comm.compress.method import CompressError, Draw, Method, Over, State
from shoal.comm.compress.mstopk import bisected
from shoal.comm.compress.powersgd import PowerSgd
from shoal.comm.compress.randomk import RandomK
from shoal.comm.compress.sketch import CountSketch, median
from shoal.comm.compress.table import codec_of, method_of
from shoal.comm.compress.topk import largest
from shoal.strategy import compress as terms
from shoal.strategy.term import REGISTRY

DTYPES = (torch.float32, torch.float64)
FEEDBACK = [
    terms.int8(), terms.onebit(), terms.sign(), terms.topk(0.01), terms.randomk(0.05), terms.threshold(0.5),
    terms.dgc(0.01), terms.mstopk(0.01), terms.gtopk(0.01), terms.hitopk(0.02), terms.sketch(3, 64),
    terms.powersgd(2),
]  # fmt: skip
UNBIASED = [terms.qsgd(1), terms.qsgd(3), terms.qsgd(8), terms.ternary()]
ALL = [terms.none(), terms.fp16(), *UNBIASED, *FEEDBACK]
CODES = [terms.int8(), terms.qsgd(1), terms.qsgd(4), terms.qsgd(8), terms.qsgd(16), terms.ternary(), terms.onebit(),
         terms.sign(), terms.topk(0.01), terms.mstopk(0.01)]  # fmt: skip
SIZES = (1, 7, 8, 255, 257, 513, 1025, 2063)


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


def test_every_term_of_the_family_has_a_method() -> None:
    named = {name for name, term in REGISTRY.items() if issubclass(term, terms.CompressTerm)}
    assert named == {type(term).__name__ for term in ALL}
    for term in ALL:
        assert method_of(term).term == term


# What is sent and what is kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("term", [t for t in FEEDBACK if not isinstance(t, terms.dgc)], ids=str)
def test_sent_and_residual_are_the_gradient(term: terms.CompressTerm, dtype: torch.dtype) -> None:
    for name, x in gradients(dtype).items():
        method, state = method_of(term), State()
        for step in range(3):
            before, given_x = take(state, "residual", x).clone(), x.clone()
            total = method.reduce(x, state, Over(), draw(step))
            assert total.shape == x.shape
            assert total.dtype == dtype
            assert torch.equal(x, given_x), "the gradient was changed"
            scale = max(float((x + before).abs().max()), float(total.abs().max()))
            assert close(total + take(state, "residual", x), x + before, scale), (name, step)


@pytest.mark.parametrize(
    "term", [terms.topk(0.01), terms.mstopk(0.01), terms.randomk(0.01), terms.sketch(3, 64)], ids=str
)
def test_sparse_methods_send_elements_unchanged(term: terms.CompressTerm) -> None:
    x, state = normal(40, 50), State()
    total = method_of(term).reduce(x, state, Over(), draw())
    chosen = total != 0
    assert torch.equal(total[chosen], x[chosen])
    assert torch.equal(state["residual"].view_as(x), torch.where(chosen, 0.0, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dgc_sends_what_a_plain_loop_sends(dtype: torch.dtype) -> None:
    x_of = [normal(30, 50, seed=step, dtype=dtype) for step in range(60)]
    method, state = method_of(terms.dgc(0.02), clip=30.0), State()
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
        method, state = method_of(terms.dgc(0.01)), State()
        for step in range(3):
            before, velocity = take(state, "residual", x).clone(), take(state, "velocity", x).clone()
            total = method.reduce(x, state, Over(), draw(step))
            value = before + 0.9 * velocity + x
            scale = float(value.abs().max())
            assert close(total + take(state, "residual", x), value, scale), name


def test_dgc_starts_gently_and_comes_down_to_its_fraction() -> None:
    found = [traffic.warm_up_fraction(0.01, step) for step in (0, 24, 25, 50, 75, 100, 10**9)]
    assert found == [0.25, 0.25, 0.0625, 0.015625, 0.01, 0.01, 0.01]
    assert traffic.warm_up_fraction(0.5, 0) == 0.5


@pytest.mark.parametrize("term", ALL, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_no_number_is_seen_and_leaves_no_trace(term: terms.CompressTerm, bad: float) -> None:
    method, state = method_of(term), State()
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
            found.append(method_of(term).reduce(normal(32, 40, seed=step), state, Over(), draw(step)).view(-1).tolist())
        return found

    state = State()
    run(state, range(3))
    saved = {name: value.clone() for name, value in state.items()}
    assert run(state, range(3, 6)) == run(saved, range(3, 6))


def test_what_is_kept_is_flat_and_as_long_as_the_parameter() -> None:
    for term in FEEDBACK:
        state = State()
        method_of(term).reduce(normal(33, 65), state, Over(), draw())
        for name, value in state.items():
            assert name in ("residual", "velocity", "query")
            assert value.shape == ((65, 2) if name == "query" else (33 * 65,))


@pytest.mark.parametrize("term", ALL, ids=str)
def test_an_empty_tensor_is_reduced_to_itself(term: terms.CompressTerm) -> None:
    assert method_of(term).reduce(torch.empty(0, 5), {}, Over(), draw()).shape == (0, 5)


def test_a_state_of_another_parameter_is_refused_in_words() -> None:
    with pytest.raises(CompressError, match=r'"residual" has shape \[7\]; expected \[2145\]'):
        method_of(terms.topk(0.1)).reduce(normal(33, 65), {"residual": torch.zeros(7)}, Over(), draw())


def test_a_gradient_in_half_precision_is_refused_in_words() -> None:
    with pytest.raises(CompressError, match="expected float32 or float64"):
        method_of(terms.sign()).reduce(normal(33, 65).bfloat16(), {}, Over(), draw())


def test_ranks_that_do_not_fit_their_group_are_refused() -> None:
    with pytest.raises(CompressError, match="expected 0 <= rank < size"):
        Over(size=2, rank=0)
    with pytest.raises(CompressError, match="both or neither"):
        Over(inside=Over())


# Codecs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("term", CODES, ids=str)
def test_a_payload_has_the_bytes_of_the_formula(term: terms.CompressTerm, size: int, dtype: torch.dtype) -> None:
    payload = codec_of(term).encode(normal(size, dtype=dtype), draw())
    assert payload.dtype == torch.uint8
    assert len(payload) == traffic.payload_bytes(term, size, dtype.itemsize)


def test_a_bit_is_one_bit_and_everything_is_counted() -> None:
    n, scale = 10_000, 32
    sparse = 100 * (32 + 32)
    expected = {
        terms.sign(): n + scale, terms.onebit(): n + 2 * scale, terms.qsgd(4): 5 * n + 20 * scale,
        terms.ternary(): n * 8 // 5 + 20 * scale, terms.int8(): 8 * n + 40 * scale, terms.topk(0.01): sparse,
        terms.mstopk(0.01): sparse, terms.randomk(0.01): 100 * 32,
    }  # fmt: skip
    for term, bits in expected.items():
        payload = codec_of(term).encode(normal(n), draw())
        assert (str(term), payload.numel() * payload.element_size() * 8) == (str(term), bits)


def coded(codec: Codec, x: torch.Tensor, step: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(x, draw(step)), len(x), x.dtype, draw(step))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_int8_errs_by_half_a_step_of_its_block(size: int, dtype: torch.dtype) -> None:
    x = normal(size, dtype=dtype)
    x[size // 2] = 1000
    found = coded(codec_of(terms.int8()), x)
    for start in range(0, size, 256):
        block = slice(start, start + 256)
        assert (found[block] - x[block]).abs().max() <= x[block].abs().max() / 127 * 0.5000001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [1, 4, 7, 8, 9, 16])
def test_qsgd_errs_by_less_than_a_level_of_its_block(bits: int, size: int, dtype: torch.dtype) -> None:
    x = normal(size, dtype=dtype)
    found = coded(codec_of(terms.qsgd(bits)), x)
    for start in range(0, size, 512):
        block = slice(start, start + 512)
        scale = x[block].abs().max()
        assert (found[block] - x[block]).abs().max() < scale / (2**bits - 1) * 1.0001
        assert (found[block].abs().max() - scale).abs() <= 1e-6 * scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_ternary_is_three_values_and_the_largest_stays(dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype)
    found = coded(codec_of(terms.ternary()), x)
    for start in range(0, 1025, 512):
        block, scale = slice(start, start + 512), x[start : start + 512].abs().max()
        assert set(found[block].tolist()) <= {-scale.item(), 0.0, scale.item()}
        largest_at = x[block].abs().argmax()
        assert found[block][largest_at] == x[block][largest_at]
    assert (found * x >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_and_onebit_keep_signs_and_means(dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype) + 0.3
    signs = coded(codec_of(terms.sign()), x)
    torch.testing.assert_close(signs, torch.sign(x) * x.abs().mean())
    means = coded(codec_of(terms.onebit()), x)
    torch.testing.assert_close(means, torch.where(x < 0, x[x < 0].mean(), x[x >= 0].mean()))
    assert coded(codec_of(terms.onebit()), x.abs()).unique().numel() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e37])
def test_fp16_keeps_eleven_bits_whatever_the_size_of_gradients(size: float, dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype).clamp(min=1e-3) * size
    total = method_of(terms.fp16()).reduce(x, {}, Over(), draw())
    assert torch.isfinite(total).all()
    assert ((total - x).abs() <= x.abs() * 2.0**-10).all()


def test_fp16_takes_two_bytes_an_element_and_two_for_the_scale() -> None:
    assert len(Half().encode(normal(1025), draw())) == 2 * 1025 + 2


@settings(max_examples=60, deadline=None)
@given(some.lists(some.integers(0, 2**17 - 1), min_size=1, max_size=70), some.integers(1, 17))
def test_numbers_survive_packing(numbers: list[int], bits: int) -> None:
    given_numbers = torch.tensor([number % 2**bits for number in numbers], dtype=torch.int32)
    packed = packing.packed_numbers(given_numbers, bits)
    assert len(packed) == bits * ceil(len(numbers) / 8)
    assert packing.unpacked_numbers(packed, bits, len(numbers)).tolist() == given_numbers.tolist()


@settings(max_examples=60, deadline=None)
@given(some.lists(some.integers(0, 2), min_size=1, max_size=40))
def test_trits_survive_packing_five_to_a_byte(trits: list[int]) -> None:
    packed = packing.packed_trits(torch.tensor(trits, dtype=torch.uint8))
    assert len(packed) == ceil(len(trits) / 5)
    assert packing.unpacked_trits(packed, len(trits)).tolist() == trits


@settings(max_examples=60, deadline=None)
@given(some.lists(some.booleans(), min_size=1, max_size=40))
def test_bits_pack_alike_on_every_device(bits: list[bool]) -> None:
    tensor = torch.tensor(bits)
    packed = packing.packed_bits(tensor)
    assert torch.equal(packing.shifted_in(tensor), packed)
    assert packing.unpacked_bits(packed, len(bits)).tolist() == packing.shifted_out(packed, len(bits)).tolist()
    assert packing.unpacked_bits(packed, len(bits)).bool().tolist() == bits


@pytest.mark.parametrize("term", [terms.qsgd(1), terms.qsgd(3), terms.qsgd(16), terms.ternary()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_10000_draws_is_the_gradient(term: terms.CompressTerm, dtype: torch.dtype) -> None:
    x = normal(512, dtype=dtype)
    x[:4] = torch.tensor([0.0, 1e-20, -7.0, 0.5])
    copies, steps = 100, 100
    codec, total, squares = codec_of(term), torch.zeros(512).double(), torch.zeros(512).double()
    for step in range(steps):
        found = coded(codec, x.repeat(copies), step).view(copies, 512).double()
        total += found.sum(0)
        squares += (found - x.double()).square().sum(0)
    error = (total / (copies * steps) - x.double()).abs()
    standard_error = (squares / (copies * steps)).sqrt() / (copies * steps) ** 0.5
    rounding = torch.finfo(dtype).eps * 7
    assert (error <= 5 * standard_error + rounding).all()
    assert standard_error.max() > 0


# Choosing elements

FEW_VALUES = some.lists(some.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, -2.5, 1e-3]), min_size=1, max_size=200)


def assert_largest(x: torch.Tensor, places: torch.Tensor, count: int) -> None:
    assert len(places) == len(places.unique()) == count
    rest = torch.ones(len(x), dtype=torch.bool)
    rest[places] = False
    if rest.any():
        assert x[places].abs().min() >= x[rest].abs().max()


@settings(max_examples=200, deadline=None)
@given(FEW_VALUES, some.integers(1, 200), some.sampled_from(DTYPES))
def test_mstopk_finds_exactly_k_of_the_largest_among_ties(values: list[float], count: int, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    count = min(count, len(x))
    assert_largest(x, bisected(x, count), count)
    assert_largest(x, largest(x, count), count)


def large(kind: str, dtype: torch.dtype) -> torch.Tensor:
    n = 200_003
    x = normal(n, dtype=dtype)
    if kind == "constant":
        return torch.full((n,), 0.1, dtype=dtype)
    if kind == "zeros":
        return torch.zeros(n, dtype=dtype)
    if kind == "one huge":
        x[5] = 1e37
    if kind == "few values":
        return x.round()
    if kind == "sparse":
        x[torch.arange(n) % 1000 != 0] = 0
    if kind == "heavy tails":
        return x**7
    if kind == "the sample sees only small ones":
        x[:: (n // 8192) | 1] = 0
    if kind == "the sample sees only large ones":
        x[:: (n // 8192) | 1] *= 100
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind",
    ["normal", "constant", "zeros", "one huge", "few values", "sparse", "heavy tails",
     "the sample sees only small ones", "the sample sees only large ones"],
)  # fmt: skip
def test_exactly_k_of_the_largest_in_large_tensors(kind: str, dtype: torch.dtype) -> None:
    x = large(kind, dtype)
    for count in (1, 20, 2_000, 30_000, 150_000, len(x)):
        assert_largest(x, bisected(x, count), count)
        assert_largest(x, largest(x, count), count)


def test_threshold_sends_all_that_reach_it_and_no_other() -> None:
    x = torch.tensor([0.5, -0.5, 0.49, -3.0, 0.0, 0.500001])
    payload = codec_of_threshold(0.5).encode(x, draw())
    values, places = sparse_parts(payload, x.dtype)
    assert places.tolist() == [0, 1, 3, 5]
    assert values.tolist() == x[[0, 1, 3, 5]].tolist()
    assert len(codec_of_threshold(4.0).encode(x, draw())) == 0
    # Smaller than any number of this type: all but zeros.
    assert len(codec_of_threshold(1e-300).encode(x, draw())) == 5 * 8


def codec_of_threshold(least: float) -> Codec:
    method = method_of(terms.threshold(least))
    assert isinstance(method, Compressed)
    return method.codec


def test_randomk_draws_each_place_equally_often_and_none_twice() -> None:
    codec, n, rounds = RandomK(fraction=0.3), 101, 4000
    counts = torch.zeros(n)
    for step in range(rounds):
        places = codec.places(n, draw(step, rank=step % 5))
        assert len(places.unique()) == len(places) == 30
        counts[places] += 1
    expected = rounds * 30 / n
    assert (counts - expected).abs().max() < 5 * (expected * (1 - 30 / n)) ** 0.5
    assert torch.equal(codec.places(n, draw(1, rank=0)), codec.places(n, draw(1, rank=3)))
    assert not torch.equal(codec.places(n, draw(1)), codec.places(n, draw(2)))


# Random draws


def test_draws_depend_on_all_that_they_should() -> None:
    def number(generator: torch.Generator) -> float:
        return torch.rand(1, generator=generator, dtype=torch.float64).item()

    base = draw(step=1, rank=1)
    assert number(base.shared()) == number(draw(step=1, rank=2).shared())
    assert number(base.own()) == number(base.own())
    others = [draw(step=2, rank=1), draw(1, 1, key="ü\n\ud800"), draw(1, 1, seed=4), draw(step=1, rank=2)]
    assert len({number(each.own()) for each in [base, *others]}) == 5
    assert len({number(each.shared()) for each in [base, *others]}) == 4
    assert number(base.own()) != number(base.shared())


# Sketches


def counted(rows: int, columns: int, n: int, step: int = 0) -> CountSketch:
    return CountSketch(rows=rows, columns=columns, num_elements=n, draw=draw(step), device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sketches_add(dtype: torch.dtype) -> None:
    sketch, a, b = counted(5, 100, 1031), normal(1031, dtype=dtype), normal(1031, seed=1, dtype=dtype)
    both = sketch.table(a) + sketch.table(b)
    assert both.shape == (5, 100)
    assert close(both, sketch.table(a + b), scale=100.0)


def test_an_element_lands_once_in_each_row_with_a_sign_and_is_read_back() -> None:
    sketch = counted(4, 10, 50)
    cells = set()
    for at in range(50):
        x = torch.zeros(50)
        x[at] = 3.0
        table = sketch.table(x)
        assert ((table != 0).sum(1) == 1).all()
        assert (table.abs().sum(1) == 3).all()
        assert sketch.estimates(table)[at] == 3.0
        cells.add(tuple(table.nonzero()[:, 1].tolist()))
    assert len(cells) > 25


def test_hashes_spread_evenly_and_signs_cancel() -> None:
    sketch = counted(1, 64, 64_000)
    fill = sketch.table(torch.ones(64_000))
    # 1000 elements a cell: the sum of their signs has a standard deviation of about 32.
    assert fill.abs().max() < 5 * 32
    assert fill.abs().max() > 0
    cells = sketch._cells(0)
    assert 0 <= cells.min() <= cells.max() < 128
    assert (cells.bincount(minlength=128) - 500).abs().max() < 5 * 500**0.5


def test_estimates_of_heavy_elements_are_near_and_right_on_average() -> None:
    x = normal(4096) * 0.01
    x[[5, 999, 4000]] = torch.tensor([3.0, -2.0, 1.0])
    found = [counted(5, 512, 4096, step).estimates(counted(5, 512, 4096, step).table(x)) for step in range(40)]
    for each in found:
        assert set(each.abs().topk(3).indices.tolist()) == {5, 999, 4000}
    mean = torch.stack(found).mean(0)
    assert (mean[[5, 999, 4000]] - x[[5, 999, 4000]]).abs().max() < 0.02


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 10, 13])
def test_the_median_over_rows(rows: int) -> None:
    values = normal(rows, 77)
    expected = torch.from_numpy(np.median(values.double().numpy(), axis=0)).float()
    torch.testing.assert_close(median(list(values.clone())), expected)


# Low rank


def low_rank(rows: int, columns: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    left, right = normal(rows, rank, seed=seed, dtype=torch.float64), normal(rank, columns, seed=seed + 50)
    return (left @ right.double()).to(dtype)


def test_powersgd_sends_a_matrix_of_its_rank_whole() -> None:
    x, state = low_rank(40, 60, 2), State()
    total = method_of(terms.powersgd(2)).reduce(x, state, Over(), draw())
    torch.testing.assert_close(total, x)
    assert state["residual"].abs().max() < 1e-4


def test_powersgd_finds_the_main_directions_by_its_warm_start() -> None:
    x = low_rank(60, 80, 1) * 10 + normal(60, 80, seed=9, dtype=torch.float64)
    best = torch.linalg.svdvals(x)[1:].square().sum().sqrt()
    method, state, errors = PowerSgd(terms.powersgd(1)), State(), []
    for step in range(6):
        query = {"query": state["query"]} if state else State()
        errors.append((x - method.reduce(x, query, Over(), draw(step))).norm() / best)
        state = query
    assert errors[0] > errors[-1] * 1.0001
    assert errors[-1] < 1.001


def test_powersgd_wakes_up_after_a_gradient_of_zeros() -> None:
    method, state = method_of(terms.powersgd(2)), State()
    assert method.reduce(torch.zeros(30, 40), state, Over(), draw(0)).abs().max() == 0
    x = low_rank(30, 40, 2, dtype=torch.float32)
    torch.testing.assert_close(method.reduce(x, state, Over(), draw(1)), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_powersgd_does_not_depend_on_the_size_of_gradients(size: float) -> None:
    method, state = method_of(terms.powersgd(2)), State()
    for step in range(4):
        x = low_rank(30, 40, 2, seed=step, dtype=torch.float32) * size
        total = method.reduce(x, state, Over(), draw(step))
        state.pop("residual")
        assert (total - x).abs().max() < 1e-4 * x.abs().max()


@pytest.mark.parametrize("shape", [(1, 2000), (2000, 1), (3, 5), (7,), (2, 3, 4, 5)])
def test_powersgd_takes_any_shape_and_a_rank_that_does_not_fit(shape: tuple[int, ...]) -> None:
    x, state = normal(*shape, dtype=torch.float64), State()
    total = method_of(terms.powersgd(64)).reduce(x, state, Over(), draw())
    torch.testing.assert_close(total, x)


# What pays, and what is predicted


def test_small_tensors_vectors_and_what_is_no_smaller_are_left_alone() -> None:
    for term in ALL[1:]:
        assert not method_of(term).pays((100_000,), 4)
        assert not method_of(term).pays((31, 33), 4)
        assert not method_of(term).pays((0, 33), 4)
    paying = [str(term) for term in ALL if method_of(term).pays((256, 256), 4)]
    assert paying == [str(term) for term in ALL[1:]]
    assert not method_of(terms.topk(0.5)).pays((256, 256), 4)
    assert method_of(terms.topk(0.5)).pays((256, 256), 8)
    assert not method_of(terms.powersgd(128)).pays((256, 256), 4)
    assert not method_of(terms.sketch(5, 20_000)).pays((256, 256), 4)
    # Gathered from many ranks, codes outgrow the sum that a ring would send.
    assert method_of(terms.int8()).pays((256, 256), 4, ranks=7)
    assert not method_of(terms.int8()).pays((256, 256), 4, ranks=8)
    assert method_of(terms.hitopk(0.01)).pays((256, 256), 4, ranks=8, inside=4)
    assert not method_of(terms.hitopk(0.01)).pays((256, 256), 4, ranks=4, inside=4)


def test_one_rank_sends_nothing() -> None:
    for term in ALL:
        if not isinstance(term, terms.threshold):
            assert method_of(term).sent_bytes((64, 64), 4, 1, 0) == []


def test_predictions_need_no_torch() -> None:
    code = "import sys, shoal.comm.compress.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Learning with it


def quadratic(method: Method, *, steps: int, rate: float) -> float:
    """The distance to the optimum, of the distance at the start."""
    curvature = torch.linspace(0.5, 1.0, 32 * 40, dtype=torch.float64).view(32, 40)
    best = normal(32, 40, dtype=torch.float64)
    at, state = torch.zeros_like(best), State()
    for step in range(steps):
        at = at - rate * method.reduce(curvature * (at - best), state, Over(), draw(step))
    return float((at - best).norm() / best.norm())


@pytest.mark.parametrize(
    ("term", "rate"),
    [(terms.int8(), 0.5), (terms.onebit(), 0.2), (terms.sign(), 0.2), (terms.topk(0.1), 0.2), (terms.mstopk(0.1), 0.2),
     (terms.randomk(0.25), 0.1), (terms.threshold(0.01), 0.2), (terms.dgc(0.1), 0.02), (terms.gtopk(0.1), 0.2),
     (terms.sketch(3, 400), 0.1), (terms.powersgd(4), 0.2), (terms.qsgd(2), 0.3), (terms.ternary(), 0.2),
     (terms.fp16(), 0.5)],
    ids=str,
)  # fmt: skip
def test_200_steps_come_to_the_optimum(term: terms.CompressTerm, rate: float) -> None:
    assert quadratic(method_of(term), steps=200, rate=rate) < 0.02
