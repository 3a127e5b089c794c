"""The four convolutions give what the library gives, and do exactly the work and depth that their formulas say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis import convolutions as numeric
from shoal.analysis.convolution import (
    Convolution,
    algorithms,
    best_by_depth,
    best_by_work,
    cannot_winograd,
    direct,
    fft,
    im2col,
    real_work,
    winograd,
)


def layer(
    *,
    samples: int = 2,
    inputs: int = 3,
    outputs: int = 5,
    side: int = 6,
    kernel: int = 3,
    padding: int = 1,
    stride: int = 1,
) -> Convolution:
    return Convolution(
        samples=samples,
        in_channels=inputs,
        out_channels=outputs,
        image=(side, side),
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=(padding, padding),
        dilation=(1, 1),
        bias=False,
    )


def data(of: Convolution) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, kernels and what the library makes of them."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(of.samples, of.in_channels, *of.image))
    w = draw.normal(size=(of.out_channels, of.in_channels, *of.kernel))
    expected = torch.nn.functional.conv2d(
        torch.from_numpy(x), torch.from_numpy(w), stride=of.stride, padding=of.padding
    )
    return x, w, expected.numpy()


SHAPES = [layer(), layer(samples=1, inputs=4, kernel=5, padding=1, side=6), layer(kernel=1, padding=1), layer(stride=2)]


@pytest.mark.parametrize("of", SHAPES, ids=lambda of: of.shape)
@pytest.mark.parametrize("name", ["direct", "im2col", "fft"])
def test_it_agrees_with_the_library_and_counts_what_the_formula_says(name: str, of: Convolution) -> None:
    x, w, expected = data(of)
    found, meter = getattr(numeric, name)(x, w, padding=of.padding[0], stride=of.stride[0])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    formula = {"direct": direct, "im2col": im2col, "fft": fft}[name](of)
    assert (meter.work, meter.depth) == (formula.work, formula.depth)


@pytest.mark.parametrize(("kernel", "tile"), [(3, 2), (3, 4), (2, 3), (5, 2), (3, 1)])
@pytest.mark.parametrize("side", [6, 7])
def test_winograd_agrees_with_the_library_and_counts_what_the_formula_says(kernel: int, tile: int, side: int) -> None:
    of = layer(kernel=kernel, side=side, padding=1)
    x, w, expected = data(of)
    found, meter = numeric.winograd(x, w, padding=1, tile=tile)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    formula = winograd(of, tile)
    assert (meter.work, meter.depth) == (formula.work, formula.depth)


@pytest.mark.parametrize(
    "of",
    [
        layer(),
        layer(stride=3, kernel=5, padding=2, side=11),
        replace(layer(inputs=4, outputs=6), groups=2),
        replace(layer(side=9), dilation=(2, 2)),
        replace(layer(), image=(5, 8), kernel=(1, 3), padding=(0, 2), stride=(1, 2)),
    ],
    ids=lambda of: of.shape,
)
def test_output_and_weights_are_those_of_the_library(of: Convolution) -> None:
    module = torch.nn.Conv2d(
        of.in_channels,
        of.out_channels,
        of.kernel,
        stride=of.stride,
        padding=of.padding,
        dilation=of.dilation,
        groups=of.groups,
        bias=of.bias,
    )
    out = module(torch.zeros(of.samples, of.in_channels, *of.image))
    assert tuple(out.shape[2:]) == of.output
    assert of.parameters == sum(parameter.numel() for parameter in module.parameters())


def test_the_formulas_of_a_layer_by_hand() -> None:
    of = layer(samples=2, inputs=4, outputs=8, side=6, kernel=3, padding=1)
    assert (direct(of).work, direct(of).depth) == (2 * 8 * 36 * 4 * 9, 2 + 2 + 2)
    # The padded plane has 64 positions: log2 is 6.
    assert fft(of).work == 64 * 6 * (8 * 4 + 2 * 4 + 2 * 8) + 64 * 2 * 4 * 8
    assert fft(of).depth == 2 * 6 + 2
    # alpha = 4; 2 * 3 * 3 tiles.
    assert winograd(of, 2).work == 32 * (36 + 48) + 4 * 18 * 128 + 16 * 32 * 18 + 8 * 18 * (32 + 16)
    assert winograd(of, 2).depth == 2 * 2 + 4 * 2 + 2
    assert im2col(of).bytes > direct(of).bytes
    gradient = of.weight_gradient()
    assert (gradient.work, gradient.depth) == (direct(of).work, 1 + 3 + 3)
    assert (of.input_gradient().work, of.input_gradient().depth) == (direct(of).work, 3 + 2 + 2)


def test_groups_divide_the_work() -> None:
    whole, halves = layer(inputs=4, outputs=6), replace(layer(inputs=4, outputs=6), groups=2)
    assert direct(whole).work == 2 * direct(halves).work
    assert winograd(whole, 2).work > winograd(halves, 2).work
    assert direct(whole).depth == direct(halves).depth + 1


def test_winograd_is_offered_only_where_it_can_compute_the_layer() -> None:
    for of, why in (
        (layer(stride=2), "stride"),
        (layer(kernel=1, padding=0), "one number"),
        (replace(layer(), dilation=(2, 2)), "dilated"),
        (replace(layer(), kernel=(3, 1), padding=(1, 0)), "square"),
    ):
        assert why in cannot_winograd(of)
        assert not any(name.startswith("winograd") for name in algorithms(of))
        with pytest.raises(ValueError, match=why):
            winograd(of, 2)


def test_the_best_is_the_least_of_all() -> None:
    for of in (*SHAPES, layer(inputs=64, outputs=64, side=56), layer(inputs=64, outputs=64, side=30, kernel=9)):
        found = algorithms(of)
        assert real_work(best_by_work(of), found[best_by_work(of)]) == min(real_work(*row) for row in found.items())
        assert found[best_by_depth(of)].depth == min(cost.depth for cost in found.values())


def test_large_kernels_are_for_the_fft_and_small_ones_for_winograd() -> None:
    def wide(kernel: int) -> Convolution:
        return layer(samples=32, inputs=64, outputs=64, side=56, kernel=kernel, padding=kernel // 2)

    assert best_by_work(wide(3)) == "winograd F(4, 3)"
    assert best_by_work(wide(11)) == "fft"
    assert best_by_work(wide(1)) == "direct"
    assert best_by_depth(wide(3)) == "direct"
    assert not any(name.startswith("winograd") for name in algorithms(wide(9)))
