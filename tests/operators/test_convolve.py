"""Every method gives what PyTorch's convolution gives, forward and backward, and does the work its formula says."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.analysis import convolution as formulas
from shoal.operators import METHODS, CannotConvolve, convolve
from shoal.operators.convolve import workspace_bytes
from shoal.operators.window import window_for
from shoal.operators.winograd import winograd

OWN = [name for name in METHODS if name != "library"]
GRID = [
    dict(kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)
    for kernel, stride, padding, dilation, groups in itertools.product(
        [(1, 1), (3, 3), (5, 5), (2, 3)], [(1, 1), (2, 1)], [(0, 0), (2, 1)], [(1, 1), (2, 3)], [1, 2]
    )
]


def data(kernel: tuple[int, int], groups: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(3, 4, 13, 14, dtype=dtype)
    weight = torch.randn(6, 4 // groups, *kernel, dtype=dtype)
    return x, weight, torch.randn(6, dtype=dtype)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("method", OWN)
def test_forward_and_backward_equal_the_librarys(method: str) -> None:
    compared = 0
    for case in GRID:
        x, weight, bias = data(case["kernel"], case["groups"])
        shape = {name: case[name] for name in ("stride", "padding", "dilation", "groups")}
        results = []
        for how in (method, "library"):
            given = [each.clone().requires_grad_() for each in (x, weight, bias)]
            try:
                y = convolve(*given, **shape, method=how)
            except CannotConvolve:
                break
            y.square().sum().backward()
            results.append([y.detach(), *(each.grad for each in given)])
        else:
            compared += 1
            for found, expected in zip(*results, strict=True):
                assert found is not None
                assert expected is not None
                close(found, expected, 1e-12)
    # Square kernels of more than one element, stride 1, no dilation.
    assert compared == (8 if method == "winograd" else len(GRID))


@pytest.mark.parametrize("method", OWN)
def test_single_precision(method: str) -> None:
    x, weight, _ = data((3, 3), 1, torch.float32)
    expected = F.conv2d(x.double(), weight.double(), padding=1)
    # The transforms of F(4, 3) multiply by up to 8 and add what nearly cancels.
    close(convolve(x, weight, padding=1, method=method).double(), expected, 1e-5)


@pytest.mark.parametrize("method", OWN)
def test_gradcheck(method: str) -> None:
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    for bound in (None, 40_000):
        assert torch.autograd.gradcheck(
            lambda x, w, bound=bound: convolve(x, w, padding=1, groups=2, method=method, most_bytes=bound), (x, weight)
        )


class Work(TorchDispatchMode):
    """Counts what PyTorch is really asked for: multiply-adds of products, and planes that are transformed."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.complex_products = self.planes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            work = math.prod(args[0].shape) * args[1].shape[-1]
            if args[0].is_complex():
                self.complex_products += work
            else:
                self.products += work
        elif name in ("_fft_r2c", "_fft_c2r"):
            self.planes += math.prod(found.shape[:-2])
        else:
            assert "conv" not in name, f"the library's own {name} was called"
        return found


def counted(method: Any, x: torch.Tensor, weight: torch.Tensor) -> Work:
    work = Work()
    window = window_for(x, weight, stride=1, padding=1, dilation=1, groups=1)
    with work:
        method(x, weight, window)
    return work


@pytest.mark.parametrize("side", [8, 11])
def test_operations_are_those_of_the_formulas(side: int) -> None:
    x, weight = torch.randn(2, 3, side, side), torch.randn(5, 3, 3, 3)
    of = formulas.Convolution(
        samples=2,
        in_channels=3,
        out_channels=5,
        image=(side, side),
        kernel=(3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
    )
    assert counted(METHODS["direct"], x, weight).products == formulas.direct(of).work
    assert counted(METHODS["im2col"], x, weight).products == formulas.im2col(of).work
    for tile in (2, 4):
        found = counted(lambda *given, tile=tile: winograd(*given, tile=tile), x, weight)
        assert found.products == formulas.winograd(of, tile).work
    # By FFT: half of a spectrum, column 0 and the middle one included, determines the rest.
    found = counted(METHODS["fft"], x, weight)
    rows, columns = side + 2, side + 2
    assert found.planes == 2 * 3 + 3 * 5 + 2 * 5
    assert found.complex_products == rows * (columns // 2 + 1) * 2 * 3 * 5
    transforms = math.ceil(rows * columns * math.log2(rows * columns)) * found.planes
    whole = found.complex_products * columns // (columns // 2 + 1)
    assert abs(formulas.fft(of).work - transforms - whole) <= 2 * 3 * 5 * rows


@pytest.mark.parametrize("method", OWN)
def test_parts_of_the_batch_keep_a_memory_bound(method: str) -> None:
    x, weight, bias = data((3, 3), 1)
    window = window_for(x, weight, stride=1, padding=1, dilation=1, groups=1)
    one = workspace_bytes(method, 1, x, weight, window)
    sizes: list[int] = []
    real = METHODS[method]

    def noting(part: torch.Tensor, *more: Any) -> torch.Tensor:
        sizes.append(len(part))
        return real(part, *more)

    results = []
    for bound in (None, one):
        given = [each.clone().requires_grad_() for each in (x, weight, bias)]
        METHODS[method] = noting
        try:
            y = convolve(*given, padding=1, method=method, most_bytes=bound)
            y.square().sum().backward()
        finally:
            METHODS[method] = real
        results.append([y.detach(), *(each.grad for each in given)])
    # At once, then sample by sample, forward and backward.
    assert sizes == [3, 1, 1, 1, 1, 1, 1]
    for found, expected in zip(*results, strict=True):
        close(found, expected, 1e-13)
    with pytest.raises(CannotConvolve, match=f"needs {one:,} bytes for one sample"):
        convolve(x, weight, padding=1, method=method, most_bytes=one - 1)


def test_an_empty_batch() -> None:
    x, weight, _ = data((3, 3), 1)
    for method in OWN:
        assert convolve(x[:0], weight, padding=1, method=method).shape == (0, 6, 13, 14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fastest"}, "expected one of library, direct"),
        ({"method": "winograd", "stride": 2}, "the stride is \\(2, 2\\)"),
        ({"groups": 3}, "4 input channels in 3 groups"),
        ({"dilation": 9}, "is larger than the padded image"),
        ({"stride": 0}, "at least 1"),
        ({"most_bytes": 1 << 20}, "PyTorch's are not known"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    x, weight, _ = data((3, 3), 1)
    with pytest.raises(CannotConvolve, match=message):
        convolve(x, weight, **changes)
