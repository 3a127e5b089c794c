"""Methods are chosen by their time, and a model keeps its parameters and what it computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.operators import ConvolutionBy, Timing, fastest, measured, time_methods


def test_another_method_is_chosen_only_where_it_is_clearly_faster() -> None:
    assert Timing(seconds={"library": 1.0, "fft": 0.5, "direct": 0.7}).best == "fft"
    assert Timing(seconds={"library": 1.0, "fft": 0.97}).best == "library"


def test_times_are_of_every_method_that_applies() -> None:
    found = time_methods(nn.Conv2d(2, 3, 3, stride=2), (2, 2, 9, 9), rounds=1).seconds
    assert set(found) == {"library", "direct", "im2col", "fft"}
    assert all(each > 0 for each in found.values())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding="same"))
        self.again = self.body[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean((2, 3))


@pytest.mark.parametrize("method", ["direct", "im2col", "fft", "winograd"])
def test_a_model_keeps_its_parameters_and_results(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def timed(conv: nn.Conv2d, shape: torch.Size) -> Timing:
        asked.append(tuple(shape))
        return Timing(seconds={"library": 1.0, method: 0.1})

    monkeypatch.setattr(measured, "time_methods", timed)
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = copy.deepcopy(model)
    same = fastest(model, x)
    assert same is model
    assert asked == [(2, 3, 8, 8)]
    chosen = model.body[0]
    assert isinstance(chosen, ConvolutionBy)
    assert chosen.method == method
    assert chosen is model.again  # Shared before, shared after.
    assert type(model.body[2]) is nn.Conv2d  # Its padding is a word.
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in before.state_dict().items()
    }
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    for each in (model, before):
        each(x).square().sum().backward()
    for (name, found), expected in zip(model.named_parameters(), before.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert (found.grad - expected.grad).abs().max() <= 1e-11 * expected.grad.abs().max() + 1e-13, name


def test_a_single_convolution_is_replaced() -> None:
    conv = nn.Conv2d(1, 1, 3)
    found = fastest(conv, torch.randn(1, 1, 5, 5))
    assert found is conv
