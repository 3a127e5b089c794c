"""Codes of four and two bits, chunk-wise top-k with a decaying memory, and DeMo: what only they promise."""

from __future__ import annotations

import pytest
import torch

from comm.test_compress import DTYPES, draw, normal
from comm.test_compress_codecs import coded
from shoal.comm.compress import payload as packing
from shoal.comm.compress.given import Over, State
from shoal.comm.compress.method import Method
from shoal.strategy.terms import compress as terms
from shoal.technique.compress.demo import cosine_transform


@pytest.mark.parametrize("dtype", DTYPES)
def test_e3m0_takes_the_nearest_power_of_two_of_its_block(dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype) ** 3
    found = coded(terms.e3m0(), x)
    points = torch.tensor([2.0**exponent for exponent in range(-6, 1)], dtype=dtype)
    for start in (0, 512, 1024):
        part, read = x[start : start + 512], found[start : start + 512]
        scale = part.abs().max()
        assert read.abs().max() == scale
        assert (read * part >= 0).all()
        relative = part.abs() / scale
        nearest = points[(relative[:, None] - points).abs().argmin(1)] * scale
        torch.testing.assert_close(read.abs(), torch.where(relative < 0.75 * 2**-6, 0.0, nearest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_bits_read_back_the_means_of_small_and_large(dtype: torch.dtype) -> None:
    x = normal(1025, dtype=dtype)
    found = coded(terms.twobit(), x)
    for start in (0, 512, 1024):
        part, read = x[start : start + 512], found[start : start + 512]
        size = part.abs()
        for chosen in (size > size.mean(), size <= size.mean()):
            if chosen.any():
                torch.testing.assert_close(read[chosen], part[chosen].sign() * size[chosen].mean())


def test_payloads_are_decoded_before_they_are_summed() -> None:
    # In four bits 1 + 1/64 would be 1.
    one, small = torch.ones(512), torch.ones(512).div_(64)
    small[0] = 1.0
    codec = terms.e3m0()
    total = codec.added([codec.encode(x, draw()) for x in (one, small)], one, draw())
    assert total[1:].unique().tolist() == [1 + 1 / 64]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 1023])
def test_codes_survive_packing(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    packed = packing.packed_codes(codes, bits)
    assert len(packed) == -(-count * bits // 8)
    assert packing.unpacked_codes(packed, bits, count).tolist() == codes.tolist()


def test_places_in_a_chunk_cost_twelve_bits() -> None:
    sent = 10 * 40
    rows = {"none": 32 * sent, "twobit": 2 * sent + 64, "e3m0": 4 * sent + 32, "int8": 8 * sent + 64}
    for code, bits in rows.items():
        term = terms.chunktopk(40 / 4096, code=code)
        assert len(term.encode(normal(10 * 4096), draw())) * 8 == 12 * sent + bits, code
    assert len(terms.chunktopk(1 / 64, chunk=64, code="none").encode(normal(640), draw())) * 8 == (6 * 16) + 10 * 32


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_decays_and_the_largest_of_every_chunk_are_sent(dtype: torch.dtype) -> None:
    method, state = Method(terms.chunktopk(4 / 128, chunk=128, code="none", decay=0.5)), State()
    memory = torch.zeros(300, dtype=dtype)
    for step in range(4):
        x = normal(300, seed=step, dtype=dtype) * torch.tensor([1.0, 1e-6, 1.0], dtype=dtype).repeat_interleave(100)
        memory = 0.5 * memory + x
        expected = torch.zeros_like(memory)
        for start, count in ((0, 4), (128, 4), (256, 1)):
            places = start + memory[start : start + 128].abs().topk(count).indices
            expected[places] = memory[places]
        memory = memory - expected
        torch.testing.assert_close(method.reduce(x, state, Over(), draw(step)), expected)
        torch.testing.assert_close(state["residual"], memory)


def test_zeros_in_a_short_chunk_spoil_nothing() -> None:
    # There are fewer elements than are sent, so some of the filling is: it must not come back as elements.
    x = torch.zeros(40)
    x[3] = 2.0
    state = State()
    total = Method(terms.chunktopk(0.9, code="twobit")).reduce(x, state, Over(), draw())
    torch.testing.assert_close(total + state["residual"], x)


@pytest.mark.parametrize("side", [2, 8, 64])
def test_the_cosine_transform_is_orthonormal(side: int) -> None:
    cosines = cosine_transform(side, torch.float64)
    torch.testing.assert_close(cosines @ cosines.t(), torch.eye(side, dtype=torch.float64), rtol=0, atol=1e-12)
    rows = normal(3, side * side, dtype=torch.float64)
    term = terms.demo(0.1, side=side)
    turned = term.turned(rows)
    torch.testing.assert_close(turned.norm(dim=1), rows.norm(dim=1))
    torch.testing.assert_close(term.turned_back(turned), rows)
    # A constant chunk is one coefficient.
    assert (term.turned(torch.ones_like(rows)).abs() > 1e-9).sum() == 3


def test_demo_sends_the_strongest_cosines_of_its_momentum_and_takes_them_out() -> None:
    term = terms.demo(2 / 64, side=8, decay=0.9)
    method, state = Method(term), State()
    at = torch.arange(8, dtype=torch.float64)
    slow, fast = torch.cos(torch.pi / 16 * (2 * at + 1)), torch.cos(torch.pi / 16 * 5 * (2 * at + 1))
    x = (torch.outer(slow, slow) + 3 * torch.outer(fast, slow)).reshape(-1) + 1e-3 * normal(64, dtype=torch.float64)
    momentum = torch.zeros_like(x)
    for step in range(3):
        momentum = 0.9 * momentum + x
        total = method.reduce(x, state, Over(), draw(step))
        torch.testing.assert_close(total + state["residual"], momentum)
        assert (term.turned(total.view(1, 64)).abs() > 1e-9).sum() == 2
        momentum = momentum - total
        assert momentum.norm() < 0.02 * x.norm()


def test_demo_may_step_by_the_sign_of_the_sum() -> None:
    x, state, plain = normal(80, 60), State(), State()
    total = Method(terms.demo(0.05, signs=True)).reduce(x, state, Over(), draw())
    assert torch.equal(total, Method(terms.demo(0.05)).reduce(x, plain, Over(), draw()).sign())
    assert torch.equal(state["residual"], plain["residual"])
