"""Preset shapes count the parameters that their papers name."""

from __future__ import annotations

import pytest

from shoal.shapes.presets import SHAPES, preset
from shoal.shapes.shape import Transformer

PUBLISHED = {
    "gpt:175b": 175e9,
    "gpt2:xl": 1.56e9,
    "llama2:7b": 6.74e9,
    "llama2:70b": 69e9,
    "llama3:8b": 8.03e9,
    "llama3:405b": 405.8e9,
    "mixtral:8x7b": 46.7e9,
    "bert:large": 0.335e9,
    "vit:l": 0.304e9,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_the_published_ones(name: str, parameters: float) -> None:
    assert preset(name).parameters == pytest.approx(parameters, rel=0.02)


def test_a_token_of_mixtral_meets_two_experts() -> None:
    assert preset("mixtral:8x7b").active_parameters == pytest.approx(12.9e9, rel=0.02)


def test_a_dense_model_is_all_active() -> None:
    assert preset("llama3:8b").active_parameters == preset("llama3:8b").parameters


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_bears_its_own_name(name: str) -> None:
    assert preset(name).name == name
    assert preset(name.replace(":", "-", 1)).name == name


def test_a_misspelt_shape_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'llama3:8b'"):
        preset("lama3:8b")


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="7 heads do not divide hidden 64"):
        Transformer(layers=1, hidden=64, heads=7)
    with pytest.raises(ValueError, match="layers of 'transformer' is 0"):
        Transformer(layers=0, hidden=64, heads=8)
