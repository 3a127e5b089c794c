"""Work is counted once, by the operators of `shoal.analysis`; whoever else multiplies sides gets the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.analysis.convolution import Convolution
from shoal.analysis.operator import Operator
from shoal.analysis.presets import network_of
from shoal.analysis.products import AttentionProduct, FullyConnected, MatrixProduct
from shoal.analysis.traced import network_of_trace
from shoal.cluster import cluster
from shoal.estimate.cost import PHYSICS, inputs_for
from shoal.estimate.cost.kernels import product_s
from shoal.estimate.cost.time import layer_products
from shoal.estimate.cost.weights import weights
from shoal.estimate.steps.operations import operations
from shoal.job import Job, TensorData
from shoal.layout.cost import flops
from shoal.layout.trace import trace
from shoal.shapes.shape import Transformer

SIDE = st.integers(1, 6)


class Mixed(nn.Module):
    """A convolution, a product of activations with itself, and linear layers with and without a bias."""

    def __init__(self, channels: int, groups: int, kernel: int, width: int, bias: bool) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(2 * groups, channels * groups, kernel, groups=groups, padding=kernel // 2, bias=bias)
        self.wide = nn.Linear(channels * groups, width, bias=bias)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.convolve(x).flatten(2).transpose(1, 2))
        return self.head((x @ x.transpose(1, 2) @ x).mean(1))


@given(
    channels=SIDE,
    groups=st.integers(1, 3),
    kernel=st.sampled_from([1, 3]),
    width=SIDE,
    side=st.integers(2, 5),
    samples=st.integers(1, 4),
    bias=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_traced_product_has_one_count_of_work(
    channels: int, groups: int, kernel: int, width: int, side: int, samples: int, bias: bool
) -> None:
    job = Job(
        name="mixed",
        model=partial(Mixed, channels, groups, kernel, width, bias),
        inputs=("x",),
        train=TensorData(x=torch.randn(8, 2 * groups, side, side), y=torch.zeros(8, dtype=torch.long)),
        loss=lambda out, batch: (nn.functional.cross_entropy(out, batch["y"], reduction="sum"), len(out)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=8,
        steps=1,
    )
    recorded = trace(job, samples=samples)
    network = network_of_trace(recorded, name="mixed")
    of_layout = [flops(recorded, op) for op in recorded.ops]
    of_table = [layer.operator.sides.work for layer in network.layers if layer.operator.sides is not None]
    assert len(of_table) == 5
    assert [each for each in of_layout if each] == [2 * work for work in of_table]
    for layer, operation in zip(network.layers, operations(network), strict=True):
        if layer.operator.sides is not None:
            work = operation.count * operation.rows * operation.columns * operation.inner
            assert work == layer.operator.forward().work
        else:
            assert operation.elements == layer.operator.numbers > 0


shapes = st.builds(
    lambda heads, kv, width, **more: Transformer(heads=heads * kv, kv_heads=kv, hidden=heads * kv * width, **more),
    heads=st.integers(1, 4),
    kv=st.integers(1, 4),
    width=st.sampled_from([4, 8]),
    layers=st.integers(1, 3),
    ffn=st.sampled_from([16, 48]),
    gated=st.booleans(),
    vocab=st.sampled_from([64, 100]),
    sequence=st.sampled_from([8, 32]),
    experts=st.sampled_from([0, 4]),
)


@given(shape=shapes, batch=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_columns_of_the_planner_multiply_what_the_network_multiplies(shape: Transformer, batch: int) -> None:
    inputs = inputs_for(shape, cluster("dgx-a100", devices=1), batch, micro_batch=batch)
    counted = sum(np.sum(each.count * each.rows * each.inner * each.columns) for each in layer_products(inputs))
    network = network_of(shape, batch)
    inside = [layer for layer in network.layers if layer.name.startswith("blocks.0.") and "router" not in layer.name]
    dense = [layer.operator for layer in inside if isinstance(layer.operator, FullyConnected)]
    assert counted == pytest.approx(sum(each.forward().work for each in dense))
    here = weights(inputs)
    held = float((here.layer_dense + here.layer_experts)[0])
    matrices = sum(each.inputs * each.outputs for each in dense)
    # Beside the matrices a layer has norms, a router and biases: the planner counts two norms and the router.
    assert held == pytest.approx(matrices + 2 * shape.hidden + shape.experts * shape.hidden)


@pytest.mark.parametrize(
    "operator",
    [
        FullyConnected(rows=6, inputs=4, outputs=5),
        MatrixProduct(batch=3, rows=2, inner=4, columns=5),
        Convolution(
            samples=2,
            in_channels=4,
            out_channels=6,
            image=(5, 5),
            kernel=(3, 3),
            stride=(1, 1),
            padding=(1, 1),
            dilation=(1, 1),
            groups=2,
        ),
    ],
)
def test_products_move_each_side_once(operator: Operator) -> None:
    assert operator.sides is not None
    assert (
        operator.forward().work
        == operator.sides.work
        == operator.input_gradient().work // (2 if isinstance(operator, MatrixProduct) else 1)
    )


@given(rows=st.integers(1, 300), inputs=st.integers(1, 300), outputs=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_the_kernels_of_the_planner_move_the_bytes_of_the_operators(rows: int, inputs: int, outputs: int) -> None:
    columns = inputs_for(Transformer(layers=1, hidden=8, heads=1), cluster("dgx-a100", devices=1), 1, precision="fp32")
    columns = replace(columns, memory_bytes_per_s=np.ones(1))
    physics = replace(PHYSICS, memory=1.0, kernel_s=0.0)
    m, n, k = (np.array([float(each)]) for each in (rows, outputs, inputs))
    # On a device that multiplies in no time, a product takes what its bytes take.
    moved = product_s(columns, physics, m, n, k, rate=np.array([np.inf]))
    operator = FullyConnected(rows=rows, inputs=inputs, outputs=outputs)
    assert moved[0] == operator.forward().bytes == operator.weight_gradient().bytes


def test_attention_is_no_product_of_one_size() -> None:
    whole = AttentionProduct(samples=2, heads=4, kv_heads=4, queries=8, keys=8, head_dim=4, value_dim=4, causal=False)
    assert whole.sides is None
    assert whole.forward().work == 2 * 4 * 64 * (4 + 2 + 4)
