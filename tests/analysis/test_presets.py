"""Known networks have the parameters and multiply-adds that their authors published, and answer without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.analysis import Network, concurrency, network_of, preset_names, preset_network, report
from shoal.analysis.convolution import Convolution
from shoal.analysis.presets import is_preset
from shoal.analysis.products import AttentionProduct, FullyConnected
from shoal.shapes.shape import Transformer

PARAMETERS = {
    "lenet": 61_706,
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "googlenet": 6_624_904,
    "resnet50": 25_557_032,
    "densenet121": 7_978_856,
    "gpt2:small": 124_439_808,
    "gpt2:medium": 354_823_168,
    "gpt2:large": 774_030_080,
    "gpt2:xl": 1_557_611_200,
    "llama2:7b": 6_738_415_616,
    "llama2:13b": 13_015_864_320,
    "llama2:70b": 68_976_648_192,
    "llama3:8b": 8_030_261_248,
    "llama3:70b": 70_553_706_496,
    "llama3:405b": 405_853_388_800,
    "mixtral:8x7b": 46_702_792_704,
    "bert:base": 109_514_298,
    "vit:b": 86_567_656,
    "vit:l": 304_326_632,
}
"""Of the published weights: torchvision's, OpenAI's, Meta's, Mistral's, Google's (BERT with its language head)."""

MULTIPLY_ADDS = {
    "lenet": 416_520,
    "alexnet": 714_188_480,
    "vgg16": 15_470_264_320,
    "googlenet": 1_498_376_192,
    "resnet50": 4_089_184_256,
    "densenet121": 2_834_161_664,
}
"""Of convolutions and fully connected layers on one image; torchvision publishes 0.71, 15.47, 1.50, 4.09 and 2.83 G."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_has_the_published_parameters(name: str) -> None:
    assert preset_network(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_it_has_the_published_multiply_adds(name: str) -> None:
    assert products(preset_network(name, batch=1)) == MULTIPLY_ADDS[name]
    assert products(preset_network(name, batch=3)) == 3 * MULTIPLY_ADDS[name]


def products(network: Network) -> int:
    kinds = (Convolution, FullyConnected)
    return sum(layer.operator.forward().work for layer in network.layers if isinstance(layer.operator, kinds))


def test_gpt3_is_as_large_as_its_name() -> None:
    assert 174e9 < preset_network("gpt:175b").parameters < 175.5e9


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_analysed(name: str) -> None:
    network = preset_network(name)
    assert is_preset(name)
    assert network.layers
    assert network.step.depth <= network.step.work
    # Backward does each product twice, except that of data.
    assert 1.65 * network.forward.work < network.backward.work <= 2.05 * network.forward.work
    assert not report(network)["unknown"]


def test_work_of_a_transformer_is_its_weights_and_its_attention() -> None:
    """Tokens times weights, in multiply-adds; embeddings are looked up, not multiplied."""
    shape = Transformer(
        layers=3, hidden=64, heads=4, kv_heads=2, ffn=96, gated=True, vocab=100, tied=False, sequence=16
    )
    network = network_of(shape, 5)
    weights = shape.parameters - shape.vocab * shape.hidden
    assert products(network) == 5 * 16 * weights
    attention = [layer.operator for layer in network.layers if isinstance(layer.operator, AttentionProduct)]
    assert [each.scores for each in attention] == 3 * [5 * 4 * 16 * 17 // 2]


def test_only_active_experts_work() -> None:
    shape = Transformer(
        layers=2,
        hidden=64,
        heads=4,
        ffn=128,
        gated=True,
        vocab=100,
        tied=False,
        experts=8,
        active_experts=2,
        sequence=16,
    )
    network = network_of(shape, 4)
    assert products(network) == 4 * 16 * (shape.active_parameters - shape.vocab * shape.hidden)
    # Experts lie side by side: as deep as one of them.
    dense = network_of(Transformer(layers=2, hidden=64, heads=4, ffn=128, gated=True, vocab=100, sequence=16), 4)
    assert network.forward.depth < dense.forward.depth + 2 * 20


def axes(network: Network) -> dict[str, int]:
    return {axis.axis: axis.degree for axis in concurrency(network)}


def test_concurrency_of_each_axis_is_read_off_the_shapes() -> None:
    assert axes(preset_network("llama3:8b", batch=6)) == {
        "dp": 6,
        "pp": 35,
        "tp": 32,
        "cp": 8192,
        "ep": 1,
        "spatial": 1,
    }
    assert axes(preset_network("mixtral:8x7b"))["ep"] == 8
    assert axes(preset_network("vgg16", batch=64)) == {
        "dp": 64,
        "pp": 16,
        "tp": 25_088,
        "cp": 1,
        "ep": 1,
        "spatial": 224 * 224,
    }
    assert axes(preset_network("vit:b"))["spatial"] == 1


def test_shares_of_the_work_are_shares() -> None:
    for name in ("mixtral:8x7b", "resnet50", "lenet"):
        shares = {axis.axis: axis.work_share for axis in concurrency(preset_network(name))}
        assert all(0 <= share <= 1 for share in shares.values())
        assert shares["tp"] > 0.9
    assert 0.5 < {axis.axis: axis.work_share for axis in concurrency(preset_network("mixtral:8x7b"))}["ep"] < 1


def test_blocks_that_repeat_are_told_once() -> None:
    told = report(preset_network("gpt:175b"))
    names = [(group["first"], group["last"], group["count"]) for group in told["groups"]]
    assert names[2] == ("blocks.0", "blocks.95", 96)
    assert [name for name, _, _ in names] == ["tokens", "positions", "blocks.0", "norm", "head", "loss"]
    work = sum(group["count"] * group["forward"]["work"] for group in told["groups"])
    assert work == told["totals"]["forward"]["work"]
    assert (
        sum(group["count"] * group["backward_work"] for group in told["groups"]) == told["totals"]["backward"]["work"]
    )


def test_blocks_that_differ_are_not_told_as_one() -> None:
    groups = report(preset_network("resnet50"))["groups"]
    counts = {group["first"]: group["count"] for group in groups}
    # The first block of a stage has a shortcut of its own; the last carries the final pooling.
    assert (counts["stage3.0"], counts["stage3.1"]) == (1, 5)


@pytest.mark.parametrize("name", ["VGG-16", "resnet-50", "ResNet50", "gpt2-medium", "Llama3-8B"])
def test_names_may_be_spelled_as_the_field_does(name: str) -> None:
    assert is_preset(name)


def test_a_typo_is_refused_with_the_nearest_name() -> None:
    assert not is_preset("gpt:176b")
    with pytest.raises(ValueError, match=r"gpt:175b"):
        preset_network("gpt:176b")


@pytest.mark.processes
def test_a_preset_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from shoal.analysis import preset_network, report;"
        "[report(preset_network(name)) for name in ('vgg16', 'mixtral:8x7b')];"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
