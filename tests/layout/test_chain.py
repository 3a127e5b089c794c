"""Where a pipeline may cut a model: what crosses each cut, what forbids one, and which stages are the most even."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy
from shoal.layout.chain import Chain, ModelPiece, StageCutError, chain
from shoal.layout.cost import cost, flops
from shoal.layout.trace import trace

WIDTH, CLASSES = 6, 5


def job_of(model: Callable[[], nn.Module], *, whole: bool = False) -> Job:
    """Samples are vectors, or with `whole` tokens of a vocabulary of CLASSES."""
    x = torch.randint(0, CLASSES, (8, 4)) if whole else torch.randn(8, WIDTH)
    y = torch.randint(0, CLASSES, (8, 4) if whole else (8,))
    return Job(
        name="small",
        model=model,
        train=TensorData(x=x, y=y),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=4,
        steps=1,
    )


def chain_of(model: Callable[[], nn.Module], *, whole: bool = False) -> Chain:
    return chain(trace(job_of(model, whole=whole)))


def link(found: Chain, path: str) -> ModelPiece:
    return next(each for each in found.links if each.path == path)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class Straight(nn.Module):
    """One tensor goes through three layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skips(Straight):
    """What the first layer gave is added again behind the third."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.head(self.layers[2](self.layers[1](first)) + first)


class Loose(Straight):
    """A tensor made between two layers, that no layer is given and none gives back, is needed at the end."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        gate = torch.sigmoid(first.mean(-1, keepdim=True))
        return self.head(self.layers[2](self.layers[1](first)) * gate)


class Given(Straight):
    """A mask made by the model's code of the samples alone: no parameter has a part in it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        for layer in self.layers:
            x = layer(x) * mask
        return self.head(x)


class Again(Straight):
    """The first layer runs once more behind the second."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.head(self.layers[2](self.layers[0](x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Reaching(Straight):
    """The head reads a weight of the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.layers[0].up.weight.sum()


def test_pieces_are_layers_and_what_stands_beside_them_in_the_order_they_run() -> None:
    found = chain_of(Straight)
    assert [each.path for each in found.links] == ["layers.0", "layers.1", "layers.2", "head"]
    assert [each.is_block for each in found.links] == [True, True, True, False]
    assert found.cuts() == [1, 2, 3]
    assert found.why_not_more() == ""


def test_one_argument_crosses_the_cuts_of_a_straight_chain() -> None:
    for number, each in enumerate(chain_of(Straight).links):
        wires = [(wire.results, wire.arguments) for wire in each.wires]
        assert wires == ([(((number - 1, 0, 0),), (0,))] if number else [])


def test_a_skip_crosses_every_cut_that_it_jumps_over() -> None:
    found = chain_of(Skips)
    assert found.cuts() == [1, 2, 3]
    # Before layers.1 the skip is also its argument; one tensor crosses, as the result of layers.0.
    for number, crossing in ((1, 1), (2, 2), (3, 1)):
        assert len(found.links[number].wires) == crossing, found.links[number]
    assert (((0, 0, 0),), ()) in [(wire.results, wire.arguments) for wire in found.links[2].wires]


def test_a_tensor_that_is_no_argument_and_no_result_forbids_the_cut_and_is_named() -> None:
    found = chain_of(Loose)
    assert found.cuts() == [3], "behind the last layer the product is the head's argument"
    for path in ("layers.1", "layers.2"):
        assert "a result of sigmoid in Loose is also used after it" in link(found, path).why_not
    assert found.why_not_more().startswith("layers.1 ")
    with pytest.raises(StageCutError, match=r"into 2 stages at most, not 3: layers\.1 needs more"):
        found.stages(3)


def test_what_depends_on_no_parameter_does_not_cross() -> None:
    found = chain_of(Given)
    assert found.cuts() == [1, 2, 3]
    assert [len(each.wires) for each in found.links] == [0, 1, 1, 1]


def test_no_cut_lies_between_two_uses_of_a_layer() -> None:
    found = chain_of(Again)
    assert link(found, "layers.1").why_not == "lies between two uses of layers.0"
    assert found.cuts()[-1] == len(found.links) - 1


def test_tied_weights_belong_to_every_piece_that_reads_them() -> None:
    found = chain_of(Tied, whole=True)
    assert found.tied == {"embed.weight"}
    assert "embed.weight" in link(found, "embed").parameters & link(found, "head").parameters
    assert chain_of(Straight).tied == frozenset()


def test_a_weight_read_from_outside_its_layer_is_tied_to_where_it_is_read() -> None:
    found = chain_of(Reaching)
    assert "layers.0.up.weight" in found.tied
    assert "layers.0.up.weight" in link(found, "head").parameters


def test_every_parameter_belongs_to_a_piece() -> None:
    for model, whole in ((Straight, False), (Skips, False), (Again, False), (Tied, True)):
        held = set().union(*(each.parameters for each in chain_of(model, whole=whole).links))
        assert held == {name for name, _ in model().named_parameters()}


def test_a_layer_that_keeps_its_shape_hands_its_argument_through() -> None:
    found = chain_of(Straight)
    assert [each.same_as_argument for each in found.links] == [0, 0, 0, None]


def test_a_model_without_pieces_has_no_cut() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    found = chain_of(Bare)
    assert found.cuts() == []
    with pytest.raises(StageCutError):
        found.stages(2)


def test_declared_stages_are_taken_as_they_are_or_refused_by_name() -> None:
    found = chain_of(Loose)
    assert found.stages(2, declared=["head"]) == [(0, 3), (3, 4)]
    assert chain_of(Skips).stages(3, declared=["head", "layers.1"]) == [(0, 1), (1, 3), (3, 4)]
    for declared, num, why in (
        (["layers.2"], 2, "the model cannot be cut before it: it needs more"),
        (["layers.0"], 2, "the first piece: nothing lies before it"),
        (["layer.1"], 2, "not a piece of the model; it can be cut before head"),
        (["head"], 3, "make 2 stages, but the strategy has 3"),
        ([], 2, "make 1 stages, but the strategy has 2"),
    ):
        with pytest.raises(StageCutError, match=why):
            found.stages(num, declared=declared)


def chain_with(costs: list[float], closed: set[int]) -> Chain:
    links = tuple(
        ModelPiece(
            path=f"piece.{number}",
            is_block=True,
            cost=value,
            parameters=frozenset(),
            wires=(),
            why_not="is closed" if number in closed else "",
            same_as_argument=None,
        )
        for number, value in enumerate(costs)
    )
    return Chain(links=links, tied=frozenset(), written={})


@given(
    costs=st.lists(st.integers(0, 1000).map(float) | st.floats(0, 1e15), min_size=1, max_size=9),
    closed=st.sets(st.integers(0, 8), max_size=4),
    num=st.integers(1, 9),
    balanced=st.booleans(),
)
def test_stages_are_as_even_as_brute_force_finds(
    costs: list[float], closed: set[int], num: int, balanced: bool
) -> None:
    found = chain_with(costs, closed)
    open_cuts = [number for number in range(1, len(costs)) if number not in closed]
    assert found.cuts() == open_cuts
    if len(open_cuts) + 1 < num:
        with pytest.raises(StageCutError, match=f"at most, not {num}"):
            found.stages(num, balanced=balanced)
        return
    stages = found.stages(num, balanced=balanced)
    borders = [first for first, _ in stages] + [stages[-1][1]]
    assert len(stages) == num
    assert borders[0] == 0
    assert borders[-1] == len(costs)
    assert all(stop == after for (_, stop), (after, _) in pairwise(stages))
    assert set(borders[1:-1]) <= set(open_cuts)
    weights = costs if balanced else [1.0] * len(costs)

    def dearest(cuts: tuple[int, ...]) -> float:
        ends = [0, *cuts, len(weights)]
        return max(sum(weights[a:b]) for a, b in pairwise(ends))

    best = min(dearest(cuts) for cuts in combinations(open_cuts, num - 1))
    assert dearest(tuple(borders[1:-1])) == pytest.approx(best, rel=1e-9, abs=1e-6)


def test_a_dear_head_gets_a_stage_with_fewer_layers() -> None:
    class Wide(Straight):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 4000)

    found = chain_of(Wide)
    assert found.links[3].cost > 10 * found.links[0].cost
    assert found.stages(2) == [(0, 3), (3, 4)]
    assert found.stages(2, balanced=False) != [(0, 3), (3, 4)]


def test_a_matrix_product_costs_two_operations_for_each_multiplication() -> None:
    traced = trace(job_of(Straight), samples=3)
    products = [flops(traced, op) for op in traced.ops if flops(traced, op)]
    assert products == [2 * 3 * WIDTH * WIDTH] * 3 + [2 * 3 * WIDTH * CLASSES]


def test_views_are_free_and_everything_else_moves_bytes() -> None:
    traced = trace(
        job_of(
            partial(
                nn.Sequential, nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
            )
        )
    )
    costs = {op.name: cost(traced, op) for op in traced.ops if op.number < traced.model_stop}
    assert costs["view"] == 0
    # Reads and writes two samples of six float32.
    assert costs["tanh"] == 4.0 * 2 * (2 * WIDTH * 4)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class CallsLayers(nn.Module):
    """Has blocks, and calls their layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Layers() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(block.up(x).relu())
        return self.head(x)


def test_blocks_that_are_not_called_are_cut_between_their_layers() -> None:
    found = chain_of(CallsLayers)
    assert [found.links[n].path for n in found.cuts()][1:] == ["blocks.1.up", "blocks.2.up", "blocks.3.up", "head"]


def test_a_model_that_calls_no_module_says_so() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    assert chain_of(Own).why_not_more() == (
        "the model can be cut only between calls of modules with parameters, and it calls no module with parameters; "
        "make its layers modules and call them, and name them in LayoutHints(blocks=...) if they are in no list"
    )


def test_no_cut_comes_after_a_branch_on_data() -> None:
    class Branching(CallsLayers):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if x.sum() > -1e9 else x
            return self.head(x)

    found = chain_of(Branching)
    assert not found.cuts()
    assert link(found, "head").why_not == (
        "comes after a branch on data: the model itself (class Branching) reads the value of a tensor before it, "
        "which only the stage that computes it knows; put the branch inside one block, or use torch.where"
    )
