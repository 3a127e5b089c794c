"""Sketches add and find heavy elements; products of thin matrices follow the main directions of a gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from comm.test_compress import DTYPES, close, draw, normal
from shoal.comm.compress.given import Over, State
from shoal.comm.compress.method import Method
from shoal.strategy.terms import compress as terms
from shoal.technique.compress.sketch import CountSketch, median


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


def low_rank(rows: int, columns: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    left, right = normal(rows, rank, seed=seed, dtype=torch.float64), normal(rank, columns, seed=seed + 50)
    return (left @ right.double()).to(dtype)


def test_powersgd_sends_a_matrix_of_its_rank_whole() -> None:
    x, state = low_rank(40, 60, 2), State()
    total = Method(terms.powersgd(2)).reduce(x, state, Over(), draw())
    torch.testing.assert_close(total, x)
    assert state["residual"].abs().max() < 1e-4


def test_powersgd_finds_the_main_directions_by_its_warm_start() -> None:
    x = low_rank(60, 80, 1) * 10 + normal(60, 80, seed=9, dtype=torch.float64)
    best = torch.linalg.svdvals(x)[1:].square().sum().sqrt()
    method, state, errors = Method(terms.powersgd(1)), State(), []
    for step in range(6):
        query = {"query": state["query"]} if state else State()
        errors.append((x - method.reduce(x, query, Over(), draw(step))).norm() / best)
        state = query
    assert errors[0] > errors[-1] * 1.0001
    assert errors[-1] < 1.001


def test_powersgd_wakes_up_after_a_gradient_of_zeros() -> None:
    method, state = Method(terms.powersgd(2)), State()
    assert method.reduce(torch.zeros(30, 40), state, Over(), draw(0)).abs().max() == 0
    x = low_rank(30, 40, 2, dtype=torch.float32)
    torch.testing.assert_close(method.reduce(x, state, Over(), draw(1)), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_powersgd_does_not_depend_on_the_size_of_gradients(size: float) -> None:
    method, state = Method(terms.powersgd(2)), State()
    for step in range(4):
        x = low_rank(30, 40, 2, seed=step, dtype=torch.float32) * size
        total = method.reduce(x, state, Over(), draw(step))
        state.pop("residual")
        assert (total - x).abs().max() < 1e-4 * x.abs().max()


@pytest.mark.parametrize("shape", [(1, 2000), (2000, 1), (3, 5), (7,), (2, 3, 4, 5)])
def test_powersgd_takes_any_shape_and_a_rank_that_does_not_fit(shape: tuple[int, ...]) -> None:
    x, state = normal(*shape, dtype=torch.float64), State()
    total = Method(terms.powersgd(64)).reduce(x, state, Over(), draw())
    torch.testing.assert_close(total, x)
