"""A function of PyTorch's as operations on parts of planes: followed once on tensors without memory, then remembered.

The same programs run on ranks (`parallel/spatial/view.py`), and predict what these send (`layout/spatial/foresee.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.layout.global_view import SIZED, CannotFollow
from shoal.layout.recorded import Ref, Trace, Value
from shoal.layout.spatial.forms import AsCalled
from shoal.layout.spatial.grid import FULL, Grid, Part
from shoal.layout.spatial.rules import PlaneStep, plane_step
from shoal.layout.tensor.spread import Graph
from shoal.layout.trace import OpRecorder


@dataclass(frozen=True, slots=True)
class Program:
    """A function with certain arguments."""

    steps: tuple[PlaneStep, ...]
    inputs: tuple[tuple[int, int], ...]
    """(leaf of the arguments, value)."""
    results: tuple[Any, ...]
    """Laid flat, with a Ref for each tensor."""
    shape: TreeSpec
    parts: dict[int, Part]
    values: tuple[Value, ...]
    """Their shapes are those of the full tensors."""
    is_plain: bool
    """Whether the function runs on parts just as it is called."""
    copies: frozenset[int]
    """Values that are views of an operand in one process, and are not here."""

    def learning(self, learns: Callable[[int], bool]) -> set[int]:
        """The values that a gradient may come to; `learns` is asked for the leaves of the arguments."""
        found = {value for leaf, value in self.inputs if learns(leaf)}
        for step in self.steps:
            if step.op.name != "detach" and found.intersection(step.op.inputs):
                outputs = step.op.outputs[:1] if step.op.name.startswith("nll_loss") else step.op.outputs
                found |= {out for out in outputs if self.values[out].dtype.is_floating_point}
        return found


def followed(
    func: Any,
    leaves: list[Any],
    shape: TreeSpec,
    grid: Grid,
    part_of: Callable[[torch.Tensor], Part],
    is_copy: Callable[[torch.Tensor], bool] = lambda x: False,
) -> Program | None:
    """The function as operations on parts; None if it looks at values, and so needs its arguments in full."""
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), OpRecorder()
    made: dict[int, torch.Tensor] = {}
    # Recomputation counts what is saved and remembers operations; these are no part of the forward.
    with _disable_current_modes(), torch.no_grad(), mode:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
                full = grid.full_shape(tuple(leaf.shape), part_of(leaf))
                # Laid out in memory as it is: code may view what is dense and copy what is not.
                order = sorted(range(leaf.dim()), key=lambda dim: -leaf.stride(dim))
                dense = torch.empty([full[dim] for dim in order], dtype=leaf.dtype, device=leaf.device)
                made[id(leaf)] = dense.permute([order.index(dim) for dim in range(leaf.dim())])
        fakes = [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = {number: fake for number, fake in enumerate(fakes) if isinstance(fake, torch.Tensor)}
        values = {number: recorder.value_of(fake) for number, fake in tensors.items()}
        args, kwargs = tree_unflatten(fakes, shape)
        try:
            with recorder:
                result = func(*args, **kwargs)
        except Exception:
            return None
    results, result_shape = tree_flatten(result)
    refs = tuple(Ref(recorder.value_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in results)
    returned = [ref.value for ref in refs if isinstance(ref, Ref)]
    trace = Trace(
        model=torch.nn.Module(),
        fake=True,
        samples=0,
        values=recorder.values,
        ops=recorder.ops,
        calls=[],
        parameters={},
        buffers={},
        output=list(returned),
        loss=None,
        model_stop=len(recorder.ops),
    )
    graph = Graph(trace)
    ops = [op for op in trace.ops if graph.live[op.number]]
    parts = {value: part_of(leaves[number]) for number, value in values.items() if part_of(leaves[number]) != FULL}
    copies = {value for number, value in values.items() if is_copy(leaves[number])}
    used = frozenset(value for op in ops for value in op.inputs) | frozenset(returned)
    steps = []
    for op in ops:
        if op.overload._schema.is_mutable and op.inputs[:1] and op.inputs[0] in copies:
            raise CannotFollow(
                f"{op.name} writes in place into what is a view of a plane in one process, and a copy on ranks that "
                "hold parts of it; write to a tensor of its own"
            )
        step = plane_step(graph, grid, op, parts, used)
        steps.append(step)
        parts |= {value: part for value, part in step.outputs.items() if part != FULL}
        moved = bool(step.moves) or not isinstance(step.form, AsCalled)
        aliases = [each.alias_info for each in op.overload._schema.returns if each.alias_info is not None]
        if any(not alias.is_write for alias in aliases) and (moved or copies.intersection(op.inputs)):
            copies.update(op.outputs)
    plain = all(_is_plain(step, parts) for step in steps)
    # What was made of sizes alone would come out for this rank's part only.
    plain = plain and not any(op.outputs and not op.inputs for op in ops)
    return Program(
        steps=tuple(steps),
        inputs=tuple(values.items()),
        results=refs,
        shape=result_shape,
        parts=parts,
        values=tuple(recorder.values),
        is_plain=plain,
        copies=frozenset(copies),
    )


def _is_plain(step: PlaneStep, parts: dict[int, Part]) -> bool:
    named = step.op.name in SIZED and any(part != FULL for part in step.outputs.values())
    return not (step.moves or named) and isinstance(step.form, AsCalled)
