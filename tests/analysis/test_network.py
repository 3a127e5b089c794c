"""Work and depth of operators and of networks: by hand, and as properties of every shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.analysis import Cost, Layer, Network, NetworkBuilder, Operator, time_bounds
from shoal.analysis.brent import PROCESSORS, bounds_table
from shoal.analysis.convolution import Convolution, TransposedConvolution, algorithms
from shoal.analysis.elementwise import Activation, Add, Concatenation, Learned, Multiply, Rotary
from shoal.analysis.lookup import Embedding, Unknown
from shoal.analysis.network import intensity, parallelism
from shoal.analysis.operator import NOTHING, log2_ceil
from shoal.analysis.products import AttentionProduct, FullyConnected, MatrixProduct
from shoal.analysis.reductions import BatchNorm, LayerNorm, Loss, Pooling, Reduction, Softmax

few = st.integers(1, 6)
size = st.integers(1, 70)
sides = st.tuples(st.integers(1, 9), st.integers(1, 9))


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    image, kernel = draw(sides), draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    groups = draw(st.integers(1, 3))
    return Convolution(
        samples=draw(few),
        in_channels=groups * draw(few),
        out_channels=groups * draw(few),
        image=image,
        kernel=kernel,
        stride=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        padding=(kernel[0] // 2, kernel[1] // 2),
        dilation=(1, 1),
        groups=groups,
    )


@st.composite
def attentions(draw: st.DrawFn) -> AttentionProduct:
    kv_heads = draw(few)
    return AttentionProduct(
        samples=draw(few),
        heads=kv_heads * draw(few),
        kv_heads=kv_heads,
        queries=draw(size),
        keys=draw(size),
        head_dim=draw(size),
        value_dim=draw(size),
        causal=draw(st.booleans()),
    )


operators: st.SearchStrategy[Operator] = st.one_of(
    convolutions(),
    attentions(),
    st.builds(TransposedConvolution, back_through=convolutions()),
    st.builds(Activation, function=st.just("relu"), elements=size),
    st.builds(Add, elements=size),
    st.builds(Multiply, elements=size),
    st.builds(Rotary, elements=size),
    st.builds(Concatenation, elements=size),
    st.builds(Learned, function=st.just("mul"), elements=size, weights=size),
    st.builds(FullyConnected, rows=size, inputs=size, outputs=size, bias=st.booleans(), tied=st.booleans()),
    st.builds(MatrixProduct, batch=few, rows=size, inner=size, columns=size),
    st.builds(Pooling, samples=few, channels=few, image=sides, output=sides, kernel=sides),
    st.builds(BatchNorm, samples=size, channels=few, image=st.one_of(st.just(()), sides)),
    st.builds(LayerNorm, rows=size, width=size, bias=st.booleans(), affine=st.booleans()),
    st.builds(Softmax, rows=size, width=size),
    st.builds(Loss, rows=size, width=size),
    st.builds(Reduction, function=st.just("sum"), elements=size, outputs=few).filter(lambda o: o.outputs <= o.elements),
    st.builds(Embedding, lookups=size, table=size, width=size),
    st.builds(Unknown, name=st.just("odd"), read=size, written=size, weights=few),
)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Any graph: each layer reads some of those before it."""
    layers: list[Layer] = []
    for number in range(draw(st.integers(1, 8))):
        reads = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        layers.append(Layer(name=f"layer{number}", operator=draw(operators), inputs=tuple(sorted(reads))))
    return Network(name="any", batch=1, layers=tuple(layers))


def by_hand() -> Network:
    """4 samples of 2 x 8 x 8: convolution to 4 channels, ReLU, pooling, and 64 -> 10."""
    build = NetworkBuilder(name="by hand", batch=4)
    x = build.add(
        "conv",
        Convolution(
            samples=4,
            in_channels=2,
            out_channels=4,
            image=(8, 8),
            kernel=(3, 3),
            stride=(1, 1),
            padding=(1, 1),
            dilation=(1, 1),
        ),
    )
    x = build.add("relu", Activation(function="relu", elements=4 * 4 * 64), x)
    x = build.add("pool", Pooling(samples=4, channels=4, image=(8, 8), output=(4, 4), kernel=(2, 2)), x)
    x = build.add("fc", FullyConnected(rows=4, inputs=64, outputs=10), x)
    build.add("loss", Loss(rows=4, width=10), x)
    return build.network()


def test_a_network_computed_by_hand() -> None:
    network = by_hand()
    assert network.parameters == (4 * 2 * 9 + 4) + (64 * 10 + 10)
    convolution, relu, pool, dense = 4 * 4 * 64 * 2 * 9, 1024, 1024, 4 * 64 * 10
    assert network.forward.work == convolution + relu + pool + dense + (2 * 40 + 4)
    assert network.forward.depth == (1 + 2 + 2) + 1 + (1 + 1) + 6 + (2 * 4 + 2)
    # The first layer reads data: only its weights have a gradient, and the last to be done are these.
    assert network.backward.work == 40 + 2 * dense + pool + relu + convolution
    assert network.backward.depth == 1 + 4 + 2 + 1 + (2 + 3 + 3)
    assert network.step == Cost(
        network.forward.work + network.backward.work, 24 + 16, network.forward.bytes + network.backward.bytes
    )
    assert parallelism(network.step) == network.step.work / 40
    # Images and kernels are read once, results written once, at four bytes a number.
    assert network.layers[0].operator.forward().bytes == 4 * (4 * 2 * 64 + 72 + 4 * 4 * 64)
    assert intensity(network.forward) == network.forward.work / network.forward.bytes


@pytest.mark.parametrize(
    ("operator", "work", "depth"),
    [
        (FullyConnected(rows=3, inputs=5, outputs=7), (105, 105, 105), (3, 3, 2)),
        (BatchNorm(samples=6, channels=5), (30, 30, 30), (3, 3, 3)),
        (BatchNorm(samples=6, channels=5, image=(4, 3)), (360, 360, 360), (7, 7, 7)),
        (LayerNorm(rows=9, width=8), (72, 72, 72), (3, 3, 4)),
        (Softmax(rows=2, width=5), (20, 20, 0), (6, 4, 0)),
        (Embedding(lookups=6, table=100, width=4), (24, 0, 24), (1, 0, 3)),
        (Add(elements=9), (9, 9, 0), (1, 1, 0)),
        (MatrixProduct(batch=2, rows=3, inner=4, columns=5), (120, 240, 0), (2, 3, 0)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_operators_by_hand(operator: Operator, work: tuple[int, ...], depth: tuple[int, ...]) -> None:
    passes = (operator.forward(), operator.input_gradient(), operator.weight_gradient())
    assert tuple(cost.work for cost in passes) == work
    assert tuple(cost.depth for cost in passes) == depth


def test_attention_is_its_products_and_a_softmax() -> None:
    shape = {"samples": 2, "heads": 3, "kv_heads": 3, "queries": 8, "keys": 8, "head_dim": 4, "value_dim": 4}
    whole = AttentionProduct(**shape, causal=False)
    first = MatrixProduct(batch=6, rows=8, inner=4, columns=8).forward()
    soft = Softmax(rows=48, width=8).forward()
    second = MatrixProduct(batch=6, rows=8, inner=8, columns=4).forward()
    assert whole.forward().work == first.work + soft.work + second.work
    assert whole.forward().depth == first.depth + soft.depth + second.depth
    assert AttentionProduct(**shape, causal=True).scores == 6 * (8 * 9 // 2)
    assert whole.input_gradient().work == 2 * (first.work + second.work) + soft.work


def test_a_sum_in_pairs_takes_log2_rounds() -> None:
    assert [log2_ceil(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    with pytest.raises(ValueError, match="0 numbers"):
        log2_ceil(0)


@given(operators)
@settings(deadline=None)
def test_depth_of_an_operator_never_exceeds_its_work(operator: Operator) -> None:
    for cost in (operator.forward(), operator.input_gradient(), operator.weight_gradient()):
        assert 0 <= cost.depth <= cost.work
    if isinstance(operator, Convolution):
        assert all(cost.depth <= cost.work for cost in algorithms(operator).values())


@given(networks())
@settings(deadline=None)
def test_depth_of_a_network_never_exceeds_its_work(network: Network) -> None:
    for cost in (network.forward, network.backward, network.step):
        assert 0 <= cost.depth <= cost.work


@given(st.lists(operators, min_size=1, max_size=6))
@settings(deadline=None)
def test_in_series_depths_add_and_in_parallel_the_largest_counts(parts: list[Operator]) -> None:
    series, parallel = NetworkBuilder(name="series", batch=1), NetworkBuilder(name="parallel", batch=1)
    last = None
    for part in parts:
        last = series.add("part", part, last)
        parallel.add("part", part)
    costs = [part.forward() for part in parts]
    one, other = series.network().forward, parallel.network().forward
    assert one.work == other.work == sum(cost.work for cost in costs)
    assert one.depth == sum(cost.depth for cost in costs)
    assert other.depth == max(cost.depth for cost in costs)


def test_what_joins_branches_waits_for_the_deepest() -> None:
    """A fork, a branch of depth 3 + 5 and one of 4, and their sum, in both orders and both directions."""
    first, second = FullyConnected(rows=1, inputs=8, outputs=32), FullyConnected(rows=1, inputs=32, outputs=8)
    short = FullyConnected(rows=1, inputs=8, outputs=8)
    for turned in (False, True):
        build = NetworkBuilder(name="diamond", batch=1)
        fork = build.add("fork", FullyConnected(rows=1, inputs=16, outputs=8))
        ends = [build.add("second", second, build.add("first", first, fork)), build.add("short", short, fork)]
        build.add("join", Add(elements=8), *(reversed(ends) if turned else ends))
        network = build.network()
        assert network.forward.depth == 4 + max(3 + 5, 3) + 1
        assert network.backward.depth == 1 + max(3 + 5, 3)


def test_a_window_beyond_the_image_is_as_deep_as_the_image() -> None:
    pooling = Pooling(samples=1, channels=1, image=(1, 4), output=(1, 4), kernel=(3, 9))
    assert (pooling.forward().work, pooling.forward().depth) == (4, 2)


def test_weight_gradients_lie_beside_the_path_backwards() -> None:
    """Two matrices in series: the second's weight gradient is deep, and done while nothing waits for it."""
    build = NetworkBuilder(name="two", batch=1)
    first = FullyConnected(rows=2, inputs=2, outputs=4)
    second = FullyConnected(rows=2**9, inputs=4, outputs=2)
    build.add("second", second, build.add("first", first))
    backward = build.network().backward
    assert backward.depth == max(9, second.input_gradient().depth + first.weight_gradient().depth)
    assert backward.work == 2 * second.sides.work + first.sides.work


def test_what_learns_nothing_has_no_gradient() -> None:
    build = NetworkBuilder(name="data", batch=1)
    x = build.add("scale", Activation(function="scale", elements=8))
    build.add("fc", FullyConnected(rows=1, inputs=8, outputs=8), x)
    network = build.network()
    assert [network.input_gradient(number) for number in (0, 1)] == [NOTHING, NOTHING]


def test_a_layer_reads_only_what_comes_before_it() -> None:
    with pytest.raises(ValueError, match="reads layer 0, which does not come before it"):
        Network(name="loop", batch=1, layers=(Layer(name="a", operator=Add(elements=1), inputs=(0,)),))


@given(networks(), st.integers(1, 10**6))
@settings(deadline=None)
def test_the_time_bounds_hold_for_every_number_of_processors(network: Network, processors: int) -> None:
    cost = network.step
    bounds = time_bounds(cost, processors)
    assert bounds.least == max(cost.work / processors, cost.depth)
    assert bounds.most == cost.work / processors + cost.depth
    assert bounds.least <= bounds.most <= 2 * bounds.least


@st.composite
def unit_tasks(draw: st.DrawFn) -> list[set[int]]:
    """Operations of one unit each, and which earlier ones each waits for."""
    count = draw(st.integers(1, 40))
    return [draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set() for number in range(count)]


@given(unit_tasks(), st.integers(1, 12))
@settings(deadline=None)
def test_a_greedy_schedule_lies_between_the_bounds(tasks: list[set[int]], processors: int) -> None:
    depth: list[int] = []
    for waits in tasks:
        depth.append(1 + max((depth[number] for number in waits), default=0))
    done: set[int] = set()
    taken = 0
    while len(done) < len(tasks):
        ready = [number for number, waits in enumerate(tasks) if number not in done and waits <= done]
        done |= set(ready[:processors])
        taken += 1
    bounds = time_bounds(Cost(work=len(tasks), depth=max(depth)), processors)
    assert bounds.least <= taken <= bounds.most


def test_bounds_are_given_from_one_to_a_million() -> None:
    assert (PROCESSORS[0], PROCESSORS[-1]) == (1, 10**6)
    assert list(PROCESSORS) == sorted(PROCESSORS)
    rows = bounds_table(by_hand().step)
    assert [row.least for row in rows] == sorted((row.least for row in rows), reverse=True)
    assert rows[-1].least == by_hand().step.depth
    assert all(low <= high <= row.processors for row in rows for low, high in [row.speedup(by_hand().step.work)])
    with pytest.raises(ValueError, match="0 processors"):
        time_bounds(by_hand().step, 0)
