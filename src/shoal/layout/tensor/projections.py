"""The projections of a model: modules that multiply by a weight of their own and do nothing else.

`nn.Linear`, convolutions and any other layer class (a `Conv1D` that stores its weight transposed) are recognised by
what they compute. Only such a module can be run with a part of its weight by wrapping its call.
`nn.MultiheadAttention` calls no modules; its two projections are known by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoal.job.gradient_hooks import hooks_of
from shoal.layout.recorded import Op
from shoal.layout.tensor.dims import bind
from shoal.layout.tensor.spread import Graph
from shoal.layout.trace import modules_by_path

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
LAYOUT = frozenset(
    "t transpose permute view _unsafe_view reshape _reshape_alias flatten unsqueeze squeeze expand detach alias "
    "clone _to_copy contiguous split split_with_sizes slice select unbind chunk".split()
)
"""Operations that change no values."""


@dataclass(slots=True)
class Projection:
    """A module that projects, with each of its products."""

    path: str
    weight: str
    """The parameter's name; its first one if it is shared."""
    ops: list[int] = field(default_factory=list)
    is_convolution: bool = False

    def output(self, graph: Graph) -> tuple[int, int]:
        """(value, dimension) of its output features, in its first call."""
        op = graph.ops[self.ops[0]]
        value = op.outputs[0]
        return value, 1 if self.is_convolution else len(graph.values[value].shape) - 1


def operands(op: Op, graph: Graph) -> tuple[int, int]:
    """(projected value, weight) of a product."""
    call = bind(op, graph.values)
    if op.name == "convolution":
        return call.named["input"].value, call.named["weight"].value
    first, second = call.tensors("self", "mat1", "batch1", "mat2", "batch2")[-2:]
    return first.value, second.value


def parameter_behind(value: int, graph: Graph) -> int | None:
    """The parameter that a value is a view or a copy of."""
    while True:
        known = graph.values[value]
        if known.source == "parameter":
            return value
        if known.producer < 0 or graph.ops[known.producer].name not in LAYOUT:
            return None
        value = graph.ops[known.producer].inputs[0]


def same_tensor(value: int, graph: Graph) -> int:
    """The value that another is a view of, of the same elements."""
    views = ("view", "_unsafe_view", "reshape", "detach", "alias", "unsqueeze", "squeeze", "_reshape_alias")
    while (number := graph.values[value].producer) >= 0 and graph.ops[number].name in views:
        value = graph.ops[number].inputs[0]
    return value


def projections(graph: Graph) -> tuple[dict[str, Projection], dict[str, str]]:
    """Path -> projection, in the order of first calls; and path -> why it is not a projection."""
    modules = modules_by_path(graph.trace.model)
    names = graph.trace.parameter_names()
    found: dict[str, Projection] = {}
    refused: dict[str, str] = {}
    for op in graph.ops[: graph.trace.model_stop]:
        if op.name not in PRODUCTS:
            continue
        weight = parameter_behind(operands(op, graph)[1], graph)
        if weight is None:
            continue
        path = _owner(op.module, names[weight], modules)
        if path is None:
            refused.setdefault(names[weight].rpartition(".")[0], f"its weight is read by {op.module or 'the model'}")
            continue
        is_attention = isinstance(modules[op.module], nn.MultiheadAttention)
        if not is_attention and (why := _does_more(op.module, graph)):
            refused.setdefault(path, why)
            continue
        known = found.setdefault(path, Projection(path, names[weight], is_convolution=op.name == "convolution"))
        known.ops.append(op.number)
    for path in found:
        if any(hooks_of(param) for param in modules[path].parameters(recurse=False)):
            refused.setdefault(path, "a hook on its gradient would see a part of it")
    for path in refused:
        found.pop(path, None)
    return found, refused


def _owner(module: str, weight: str, modules: dict[str, nn.Module]) -> str | None:
    """The path of the projection that a product in a module belongs to."""
    at = modules[module]
    wanted = _parameter(modules, weight)
    if any(param is wanted for param in at.parameters(recurse=False)):
        return module
    if isinstance(at, nn.MultiheadAttention) and at.out_proj.weight is wanted:
        return f"{module}.out_proj"
    return None


def _parameter(modules: dict[str, nn.Module], name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(modules[path], last)


def _does_more(path: str, graph: Graph) -> str:
    """Why a module is more than a projection; empty if it is not."""
    own = {value for name, value in graph.trace.parameters.items() if name.rpartition(".")[0] == path}
    calls = graph.trace.calls_of(path)
    if not calls:
        return "its call cannot be told apart"
    for call in calls:
        products = 0
        for op in graph.ops[call.first : call.stop]:
            products += op.name in PRODUCTS
            adds_bias = op.name == "add" and own.intersection(op.inputs)
            if not (op.name in PRODUCTS or op.name in LAYOUT or adds_bias):
                return f"it does more than project ({op.name})"
        if products != 1:
            return f"it multiplies {products} times in one call"
    return ""
