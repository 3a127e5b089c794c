"""Recomputation changes the state of a block once: a model under it ends in the bits of the same model without it."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from shoal.parallel.forward_state import ChangesParameters
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.written_arguments import WritesElsewhere

WIDTH = 6


@dataclass(slots=True)
class Total:
    total: float = 0.0


class Notes:
    def __init__(self) -> None:
        self.calls, self.inner = 0, SimpleNamespace(slotted=Total())


class Stateful(nn.Module):
    """Keeps a moving average by `.data`, a buffer that it replaces, a tensor and numbers as attributes, a list, and
    state in objects and generators below its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.ones(WIDTH))
        self.register_buffer("constant", torch.ones(WIDTH))
        self.power, self.calls, self.seen = torch.ones(WIDTH), 0, []
        self.by_kind: dict[str, int] = {}
        self.notes: dict[str, Any] = {"rows": [0], "sums": torch.zeros(WIDTH), "pair": (torch.zeros(WIDTH), "a")}
        self.held, self.counted, self.noise = Notes(), Counter(), torch.Generator().manual_seed(3)
        self.array = np.zeros(WIDTH)

    def below(self) -> Tensor:
        """A factor from state that lies deeper than a module's attributes."""
        self.notes["rows"][0] += 1
        self.notes["sums"].add_(0.1)
        self.notes["pair"][0].add_(0.01)
        self.held.calls += 1
        self.held.inner.slotted.total += 0.5
        self.counted["calls"] += 1
        self.array += 0.01
        drawn = float(torch.rand(1, generator=self.noise)) + random.random() + np.random.rand()
        deep = self.notes["rows"][0] + self.held.calls + self.held.inner.slotted.total + self.counted["calls"] + drawn
        return 1 + 0.01 * (deep + self.notes["sums"] + self.notes["pair"][0] + torch.from_numpy(self.array).float())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.by_kind["all"] = self.by_kind.get("all", 0) + 1
        self.latest = self.calls
        with torch.no_grad():
            self.mean.data.mul_(0.9).add_(0.1 * x.mean(0))
            self.replaced = 0.5 * self.replaced + self.calls
            self.power = 1.01 * self.power
        x = x * self.below()
        return torch.tanh(self.linear(x) * self.power - self.mean) / self.replaced * (1 + 0.1 * len(self.seen))


def block(kind: str) -> nn.Module:
    if kind == "own state":
        return Stateful()
    if kind == "spectral norm":
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
    if kind == "spectral norm by hook":
        return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
    norm = nn.BatchNorm1d(WIDTH, momentum=None if kind == "cumulative" else 0.1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh())


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def end(model: nn.Module, micros: int, pipelined: bool) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for _ in range(3):
        batches = [torch.randn(5, WIDTH, generator=draw) for _ in range(micros)]
        if pipelined:
            for loss in [model(x).square().sum() for x in batches]:
                loss.backward()
        else:
            for x in batches:
                model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {name: value.tolist() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Stateful):
            found[name] = (
                module.calls,
                module.seen,
                module.by_kind,
                module.latest,
                module.power.tolist(),
                module.held.calls,
                module.held.inner.slotted.total,
                module.counted,
                module.array.tolist(),
                module.notes["rows"],
                module.notes["sums"].tolist(),
                module.notes["pair"][0].tolist(),
                module.noise.get_state().tolist(),
            )
    return found


@pytest.mark.parametrize("kind", ["own state", "spectral norm", "spectral norm by hook", "batch norm", "cumulative"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(("micros", "pipelined"), [(1, False), (2, False), (3, True)])
def test_state_is_changed_once_under_recomputation(kind: str, mode: str, micros: int, pipelined: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"layers": nn.Sequential(*(Wrapped(block(kind)) for _ in range(3)))})
    again = copy.deepcopy(plain)
    assert recompute_blocks(again, mode)
    first, second = (end(model["layers"], micros, pipelined) for model in (plain, again))  # type: ignore[arg-type]
    assert second == first


def test_a_parameter_changed_in_forward_is_refused_by_name() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.99)
            return super().forward(x)

    model = nn.Sequential(Clamped(WIDTH, WIDTH), Clamped(WIDTH, WIDTH))
    recompute_blocks(model, "full")
    with pytest.raises(ChangesParameters, match="recompute: 0 changes its parameter weight in forward"):
        model(torch.ones(2, WIDTH))


class InPlace(nn.Module):
    """Writes into its argument, into its own products, or into both."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        if self.kind == "argument":
            return self.linear(self.relu(x)) * scale
        if self.kind == "product":
            return self.drop(self.linear(self.relu(self.linear(x)))) * scale
        if self.kind == "keyword":
            return self.linear(x) * scale.mul_(0.5).clone()
        x += self.relu(self.linear(x * 1.0))
        return x


class InPlaceModel(nn.Module):
    """Reads what its blocks have written into, once more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlace(kind) for _ in range(3))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, scale = self.first(x), torch.ones(())
        for layer in self.layers:
            h = 0.5 * layer(h, scale=scale) + h
        return h * scale


@pytest.mark.parametrize("kind", ["argument", "product", "keyword", "given back"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(("micros", "pipelined"), [(1, False), (3, True)])
def test_blocks_that_write_in_place_are_repeated_from_what_they_were_given(
    kind: str, mode: str, micros: int, pipelined: bool
) -> None:
    torch.manual_seed(0)
    plain = InPlaceModel(kind)
    again = copy.deepcopy(plain)
    assert recompute_blocks(again, mode)
    torch.manual_seed(1)
    first = end(plain, micros, pipelined)
    torch.manual_seed(1)
    assert end(again, micros, pipelined) == first


def test_a_block_that_begins_to_write_into_an_argument_is_refused_by_name() -> None:
    class Later(nn.Linear):
        writes = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2) if self.writes else x)

    model = nn.Sequential(Later(WIDTH, WIDTH), Later(WIDTH, WIDTH))
    recompute_blocks(model, "full")
    model(torch.ones(2, WIDTH))
    model[1].writes = True  # type: ignore[assignment]
    with pytest.raises(WritesElsewhere, match="recompute: 1 writes into an argument that it did not write into"):
        model(torch.ones(2, WIDTH))
