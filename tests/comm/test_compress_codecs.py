"""Codecs: what they read back, the bytes they make, and that those which draw are right on average."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from comm.compressors import GATHERED, UNBIASED
from comm.test_compress import DTYPES, draw, gradients, normal
from shoal.comm.compress import payload as packing
from shoal.comm.compress.compressor import Compressor
from shoal.comm.compress.given import Over
from shoal.comm.compress.method import Method
from shoal.strategy.terms import compress as terms

CODES = [*GATHERED, terms.qsgd(1), terms.qsgd(8), terms.qsgd(16)]
SIZES = (1, 7, 8, 255, 257, 513, 1025, 2063)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("term", CODES, ids=str)
def test_a_payload_has_the_bytes_of_the_formula(term: terms.CompressTerm, size: int, dtype: torch.dtype) -> None:
    payload = term.encode(normal(size, dtype=dtype), draw())
    assert payload.dtype == torch.uint8
    assert len(payload) == term.payload_bytes(size, dtype.itemsize)


def test_a_bit_is_one_bit_and_everything_is_counted() -> None:
    n, scale = 10_000, 32
    sparse = 100 * (32 + 32)
    expected = {
        terms.sign(): n + 20 * scale,
        terms.onebit(): n + 40 * scale,
        terms.qsgd(4): 5 * n + 20 * scale,
        terms.ternary(): n * 8 // 5 + 20 * scale,
        terms.int8(): 8 * n + 40 * scale,
        terms.topk(0.01): sparse,
        terms.mstopk(0.01): sparse,
        terms.randomk(0.01): 100 * 32,
    }
    for term, bits in expected.items():
        payload = term.encode(normal(n), draw())
        assert (str(term), payload.numel() * payload.element_size() * 8) == (str(term), bits)


def coded(codec: Compressor, x: torch.Tensor, step: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(x, draw(step)), len(x), x.dtype, draw(step))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_int8_errs_by_half_a_step_of_its_block(size: int, dtype: torch.dtype) -> None:
    x = normal(size, dtype=dtype)
    x[size // 2] = 1000
    found = coded(terms.int8(), x)
    for start in range(0, size, 256):
        block = slice(start, start + 256)
        assert (found[block] - x[block]).abs().max() <= x[block].abs().max() / 127 * 0.5000001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [1, 4, 7, 8, 9, 16])
def test_qsgd_errs_by_less_than_a_level_of_its_block(bits: int, size: int, dtype: torch.dtype) -> None:
    x = normal(size, dtype=dtype)
    found = coded(terms.qsgd(bits), x)
    for start in range(0, size, 512):
        block = slice(start, start + 512)
        scale = x[block].abs().max()
        assert (found[block] - x[block]).abs().max() < scale / (2**bits - 1) * 1.0001
        assert (found[block].abs().max() - scale).abs() <= 1e-6 * scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_ternary_is_three_values_and_the_largest_stays(dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype)
    found = coded(terms.ternary(), x)
    for start in range(0, 1025, 512):
        block, scale = slice(start, start + 512), x[start : start + 512].abs().max()
        assert set(found[block].tolist()) <= {-scale.item(), 0.0, scale.item()}
        largest_at = x[block].abs().argmax()
        assert found[block][largest_at] == x[block][largest_at]
    assert (found * x >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sign_and_onebit_keep_signs_and_means(dtype: torch.dtype) -> None:
    # Two blocks and one element: rows of small gradients keep a scale of their own.
    x = (normal(1025, dtype=dtype) + 0.3) * torch.tensor([1.0, 1e-6, 1.0], dtype=dtype).repeat_interleave(512)[:1025]
    signs, means = coded(terms.sign(), x), coded(terms.onebit(), x)
    for block in (slice(0, 512), slice(512, 1024), slice(1024, 1025)):
        part = x[block]
        torch.testing.assert_close(signs[block], torch.sign(part) * part.abs().mean())
        below, above = part[part < 0], part[part >= 0]
        expected = torch.where(part < 0, below.sum() / max(1, len(below)), above.sum() / max(1, len(above)))
        torch.testing.assert_close(means[block], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e37])
def test_fp16_keeps_eleven_bits_whatever_the_size_of_gradients(size: float, dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype).clamp(min=1e-3) * size
    total = Method(terms.fp16()).reduce(x, {}, Over(), draw())
    assert torch.isfinite(total).all()
    assert ((total - x).abs() <= x.abs() * 2.0**-10).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp16_stays_finite_at_both_ends_of_the_range(dtype: torch.dtype) -> None:
    for x in (torch.full((9,), torch.finfo(dtype).max / 2, dtype=dtype), gradients(dtype)["denormals"].view(-1)):
        # What is denormal in float64 may vanish.
        smallest = torch.finfo(dtype).smallest_normal if dtype == torch.float64 else 0.0
        assert (coded(terms.fp16(), x) - x).abs().max() <= max(float(x.abs().max()) * 2.0**-10, smallest)


def test_fp16_takes_two_bytes_an_element_and_two_for_the_scale() -> None:
    assert len(terms.fp16().encode(normal(1025), draw())) == 2 * 1025 + 2


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


@pytest.mark.parametrize("term", [*UNBIASED, terms.qsgd(1), terms.qsgd(16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_10000_draws_is_the_gradient(term: terms.CompressTerm, dtype: torch.dtype) -> None:
    x = normal(512, dtype=dtype)
    x[:4] = torch.tensor([0.0, 1e-20, -7.0, 0.5])
    copies, steps = 100, 100
    codec, total, squares = term, torch.zeros(512).double(), torch.zeros(512).double()
    for step in range(steps):
        found = coded(codec, x.repeat(copies), step).view(copies, 512).double()
        total += found.sum(0)
        squares += (found - x.double()).square().sum(0)
    error = (total / (copies * steps) - x.double()).abs()
    standard_error = (squares / (copies * steps)).sqrt() / (copies * steps) ** 0.5
    rounding = torch.finfo(dtype).eps * 7
    assert (error <= 5 * standard_error + rounding).all()
    assert standard_error.max() > 0
