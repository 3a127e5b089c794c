"""A traced model has the operators that one would write down for it by hand, joined in the same way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.analysis import Network, concurrency, network_of, preset_network, report
from shoal.analysis.elementwise import Learned
from shoal.analysis.lookup import Unknown
from shoal.analysis.presets.classic import vgg
from shoal.analysis.products import AttentionProduct, FullyConnected
from shoal.analysis.traced import module_network, traced_network
from shoal.job import Job, TensorData, cross_entropy, load_job
from shoal.shapes.shape import Transformer

EXAMPLES = Path(__file__).parents[2] / "examples"


def graph(network: Network) -> list[tuple[object, set[int]]]:
    return [(layer.operator, set(layer.inputs)) for layer in network.layers]


def assert_same(traced: Network, written: Network) -> None:
    assert graph(traced) == graph(written)
    assert traced.parameters == written.parameters
    assert (traced.forward, traced.backward) == (written.forward, written.backward)
    assert not traced.notes


def test_the_gpt_of_the_language_task() -> None:
    shape = Transformer(layers=2, hidden=32, heads=4, vocab=256, tied=False, sequence=32)
    assert_same(traced_network(load_job("language:tiny")), network_of(shape, 24, attention_bias=False))


def test_gpt2_medium_with_tied_weights_and_biases() -> None:
    assert_same(traced_network(load_job("language:gpt2-medium"), batch=2), preset_network("gpt2:medium", batch=2))


def test_the_small_vgg_with_batch_norm() -> None:
    written = vgg(
        "vgg", 24, stages=((2, 8), (2, 16)), fully_connected=(32,), classes=10, side=14, channels=1, batch_norm=True
    )
    assert_same(traced_network(load_job("image:vgg:tiny")), written)


@pytest.mark.parametrize("name", ["vgg16", "resnet50"])
def test_the_real_image_networks(name: str) -> None:
    assert_same(traced_network(load_job(f"image:{name}"), batch=2), preset_network(name, batch=2))


def test_query_key_and_value_lie_side_by_side() -> None:
    network = traced_network(load_job("language:tiny"))
    number = next(n for n, layer in enumerate(network.layers) if isinstance(layer.operator, AttentionProduct))
    projections = [network.layers[read] for read in network.layers[number].inputs]
    assert len(projections) == 3
    assert len({layer.inputs for layer in projections}) == 1


def test_an_example_of_ones_own_is_grouped_by_its_blocks() -> None:
    told = report(traced_network(load_job(str(EXAMPLES / "gpt.py"))))
    assert [(group["first"], group["count"]) for group in told["groups"]] == [
        ("tokens", 1),
        ("positions", 1),
        ("blocks.0", 2),
        ("norm", 1),
        ("head", 1),
        ("loss", 1),
    ]
    assert told["parameters"] == 136_576


def test_experts_are_found_and_their_tokens_counted() -> None:
    network = traced_network(load_job(str(EXAMPLES / "moe.py")))
    assert {axis.axis: axis.degree for axis in concurrency(network)}["ep"] == 8
    rows = [
        layer.operator.rows
        for layer in network.layers
        if layer.experts and layer.block == "blocks.0" and isinstance(layer.operator, FullyConnected)
    ]
    # Two experts for each of 24 x 64 tokens, each with two matrices.
    assert sum(rows) == 2 * 2 * 24 * 64
    assert "real samples" in network.notes[0]


def job_of(model: Callable[[], nn.Module], *, image: tuple[int, ...] = (6,)) -> Job:
    draw = torch.Generator().manual_seed(0)
    return Job(
        name="own",
        model=model,
        train=TensorData(x=torch.randn(16, *image, generator=draw), y=torch.randint(0, 4, (16,), generator=draw)),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=8,
        steps=1,
    )


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.erfinv(torch.tanh(self.inner(x))))


def test_an_operator_without_a_formula_is_named_counted_and_flagged() -> None:
    network = traced_network(job_of(Odd))
    told = report(network)
    assert told["unknown"] == {"erfinv": 1}
    unknown = [layer for layer in network.layers if isinstance(layer.operator, Unknown)]
    assert unknown[0].operator == Unknown(name="erfinv", read=48, written=48)
    assert [layer["unknown"] for group in told["groups"] for layer in group["layers"]].count(True) == 1
    # It stands where it is: the head waits for it.
    number = network.layers.index(unknown[0])
    assert number in network.layers[number + 1].inputs


def test_a_module_needs_no_job_and_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    network = module_network(module, torch.randn(5, 1, 6, 6))
    assert [layer.operator.kind for layer in network.layers] == [
        "convolution",
        "batch norm",
        "activation",
        "fully connected",
    ]
    assert (network.name, network.batch, network.parameters) == ("Sequential", 5, 36 + 4 + 8 + 130)
    assert not module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.idle = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.gain)


def test_learned_numbers_outside_of_layers_are_counted_and_idle_ones_mentioned() -> None:
    network = traced_network(job_of(Gains))
    assert network.layers[0].operator == Learned(function="mul", elements=48, weights=6)
    assert network.parameters == 6 + 28
    assert any("3 of 37 parameters" in note for note in network.notes)


def test_convolutions_of_three_dimensions_and_the_way_back() -> None:
    def solid() -> nn.Module:
        return nn.Sequential(nn.Conv3d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 8, 4))

    def upwards() -> nn.Module:
        return nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Flatten(), nn.Linear(3 * 81, 4))

    network = traced_network(job_of(solid, image=(2, 4, 4, 4)))
    assert network.layers[0].operator.forward().work == 8 * 3 * 8 * 2 * 27
    assert network.parameters == sum(parameter.numel() for parameter in solid().parameters())
    network = traced_network(job_of(upwards, image=(2, 4, 4)))
    # Each of 16 positions and 2 channels is spread over 3 channels and 9 positions.
    assert network.layers[0].operator.forward().work == 8 * 16 * 2 * 3 * 9
    assert network.parameters == sum(parameter.numel() for parameter in upwards().parameters())
    assert not report(network)["unknown"]


def test_the_batch_is_the_jobs_own_or_the_one_asked_for() -> None:
    job = job_of(Odd)
    assert traced_network(job).batch == 8
    three = traced_network(job, batch=3)
    assert three.batch == 3
    assert three.layers[0].operator == FullyConnected(rows=3, inputs=6, outputs=6)
    with pytest.raises(ValueError, match="batch 17: own has 16 samples"):
        traced_network(job, batch=17)
