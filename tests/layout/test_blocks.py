"""Blocks are found in any module tree, and every trainable parameter belongs to exactly one unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.layout.blocks import blocks, units


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in blocks(model)]


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def holding(**children: nn.Module) -> nn.Module:
    module = nn.Identity()
    for name, child in children.items():
        module.add_module(name, child)
    return module


SHARED = linear()
TREES = {
    "nothing but a layer": (linear(), []),
    "a chain": (nn.Sequential(linear(), nn.ReLU(), linear()), ["0", "2"]),
    "chains in chains": (nn.Sequential(nn.Sequential(linear(), linear()), linear()), ["0.0", "0.1", "1"]),
    "a list in a module": (
        holding(embed=linear(), layers=nn.ModuleList([linear(), linear()])),
        ["layers.0", "layers.1"],
    ),
    "a block with a list inside": (
        holding(layers=nn.ModuleList([holding(inner=nn.Sequential(linear(), linear()))])),
        ["layers.0"],
    ),
    "entries without parameters": (nn.Sequential(nn.ReLU(), nn.Dropout(), linear()), ["2"]),
    "one module in two places": (nn.Sequential(SHARED, nn.Tanh(), SHARED), ["0"]),
    "dictionaries in a list": (
        holding(layers=nn.ModuleList([nn.ModuleDict({"a": linear(), "b": linear()})])),
        ["layers.0.a", "layers.0.b"],
    ),
    "a dictionary that holds a list": (
        holding(parts=nn.ModuleDict({"embed": linear(), "layers": nn.ModuleList([linear()])})),
        ["parts.layers.0"],
    ),
    "bare parameters in a list": (
        holding(gains=nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(2))])]), head=linear()),
        [],
    ),
    "an empty list": (holding(layers=nn.ModuleList(), head=linear()), []),
}


@pytest.mark.parametrize("tree", TREES)
def test_blocks_are_the_outermost_modules_that_are_called(tree: str) -> None:
    model, expected = TREES[tree]
    assert names(model) == expected


@pytest.mark.parametrize("tree", TREES)
def test_every_trainable_parameter_belongs_to_exactly_one_unit(tree: str) -> None:
    model, _ = TREES[tree]
    parts = units(model)
    held = [name for unit in parts for name, _ in unit.params]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    assert parts[0].module is model
    assert all(unit.params for unit in parts[1:])


def test_what_two_blocks_share_is_the_roots() -> None:
    model = nn.Sequential(linear(), linear(), linear())
    model[2].weight = model[0].weight
    root, *rest = units(model)
    assert [name for name, _ in root.params] == ["0.weight"]
    assert {unit.name: [name for name, _ in unit.params] for unit in rest} == {
        "0": ["0.bias"],
        "1": ["1.weight", "1.bias"],
        "2": ["2.bias"],
    }


def test_frozen_parameters_belong_to_no_unit_and_a_frozen_block_is_none() -> None:
    model = nn.Sequential(linear(), linear())
    model[0].requires_grad_(False)
    root, *rest = units(model)
    assert root.params == ()
    assert [unit.name for unit in rest] == ["1"]
