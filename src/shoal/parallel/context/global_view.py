"""Code that was written for a full sequence, run on a rank's own positions of it.

Inside a module that holds attention written by hand, tensors that are cut along the sequence report the size of the
full one, so that masks, tables and shapes which the code makes come out as in one process. Each function that is given
a cut tensor is followed once, on tensors without memory (`layout/global_view.py`), and then run on the parts:
keys and values are gathered, masks and tables sliced, sizes in views replaced. Queries, and with them the scores, stay
cut. Autograd sees nothing but the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.layout.cuts import Cut
from shoal.layout.global_view import SIZED, PlacedOp, Walk, follow
from shoal.layout.recorded import Op, Ref, Trace
from shoal.layout.tensor.dims import bind
from shoal.layout.tensor.spread import Graph
from shoal.layout.trace import OpRecorder
from shoal.parallel.recompute import recomputing

if TYPE_CHECKING:
    from shoal.parallel.context.cut import SequenceCut

MOST_PROGRAMS = 4096
"""Functions remembered with their arguments; beyond, all are forgotten and followed anew."""


@dataclass(frozen=True, slots=True)
class _Program:
    """A function with certain arguments, as operations on parts."""

    steps: tuple[PlacedOp, ...]
    inputs: tuple[tuple[int, int], ...]
    """(leaf of the arguments, value)."""
    results: tuple[Any, ...]
    """Laid flat, with a Ref for each tensor."""
    shape: TreeSpec
    walk: Walk
    shapes: tuple[tuple[int, ...], ...]
    """Of every value, for the full sequence."""
    is_plain: bool
    """Whether the function runs on parts just as it is called."""


class GlobalView(TorchFunctionMode):
    """Active while a module that holds attention runs; `cuts` are the cut tensors that it has seen."""

    by_library = False
    """Whether attention is called for a module of PyTorch's, which hides the call from hooks on the model."""
    active: list[GlobalView] = []  # noqa: RUF012  (One stack for the process: modules call each other.)

    def __init__(self, cut: SequenceCut, length: int, programs: dict[Any, _Program | None]) -> None:
        super().__init__()
        self.cut, self.length, self.programs = cut, length, programs
        self.cuts: Any = WeakTensorKeyDictionary()
        self._full: Any = WeakTensorKeyDictionary()

    def __enter__(self) -> GlobalView:
        GlobalView.active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        GlobalView.active.pop()

    def mark(self, x: Any, cut: Cut) -> None:
        self.cuts[x] = cut

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, shape = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) and leaf in self.cuts for leaf in leaves):
            return func(*args, **kwargs)
        if func in _OF_AUTOGRAD:
            return func(*args, **kwargs)
        if func in _SIZES:
            return _SIZES[func](self._global_shape(leaves[0]), *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention:
            attended = self._attend_as_called(args, kwargs)
            if attended is not None:
                return attended
        program = self._program(func, leaves, shape)
        if program is None:
            args, kwargs = tree_map(lambda leaf: self.full(leaf), (args, kwargs))
            return func(*args, **kwargs)
        if program.is_plain:
            result = func(*args, **kwargs)
            flat = tree_flatten(result)[0]
        else:
            flat = self._run(program, leaves)
            result = tree_unflatten(flat, program.shape)
        for leaf, known in zip(flat, program.results, strict=True):
            if isinstance(known, Ref) and known.value in program.walk.cuts:
                self.cuts[leaf] = program.walk.cuts[known.value]
        return result

    def _global_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        cut = self.cuts.get(x)
        return tuple(x.shape) if cut is None else (*x.shape[: cut.dim], cut.size, *x.shape[cut.dim + 1 :])

    def full(self, x: Any) -> Any:
        """A tensor with all positions; gathered once while it stays as it is."""
        cut = self.cuts.get(x) if isinstance(x, torch.Tensor) else None
        if cut is None:
            return x
        known = self._full.get(x)
        state = _version(x), recomputing()
        if known is None or known[0] != state:
            known = self._full[x] = (state, self.cut.gather_along(x, cut, self.length))
        return known[1]

    def own(self, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        """This rank's positions of a tensor that has all."""
        return self.cut.slice_along(x, cut, self.length)

    def _program(self, func: Any, leaves: list[Any], shape: TreeSpec) -> _Program | None:
        key = (func, shape, _autocast(), tuple(self._key(leaf, leaves) for leaf in leaves))
        try:
            known = key in self.programs
        except TypeError:  # An argument that cannot be hashed.
            return self._followed(func, leaves, shape)
        if not known:
            if len(self.programs) >= MOST_PROGRAMS:
                self.programs.clear()
            self.programs[key] = self._followed(func, leaves, shape)
        return self.programs[key]

    def _key(self, leaf: Any, leaves: list[Any]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        same = next(n for n, other in enumerate(leaves) if other is leaf)
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, self.cuts.get(leaf), same

    def _followed(self, func: Any, leaves: list[Any], shape: TreeSpec) -> _Program | None:
        """The function as operations; None if it looks at values, and so needs its arguments in full."""
        mode, recorder = FakeTensorMode(allow_non_fake_inputs=True), OpRecorder()
        made: dict[int, torch.Tensor] = {}
        # Recomputation counts what is saved and remembers operations; these are no part of the forward.
        with _disable_current_modes(), torch.no_grad(), mode:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
                    size = self._global_shape(leaf)
                    made[id(leaf)] = torch.empty(size, dtype=leaf.dtype, device=leaf.device)
            fakes = [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            values = {number: recorder.value_of(fake) for number, fake in enumerate(fakes) if _is_tensor(fake)}
            args, kwargs = tree_unflatten(fakes, shape)
            try:
                with recorder:
                    result = func(*args, **kwargs)
            except Exception:
                return None
        results, result_shape = tree_flatten(result)
        refs = tuple(Ref(recorder.value_of(leaf)) if _is_tensor(leaf) else leaf for leaf in results)
        trace = Trace(
            model=torch.nn.Module(),
            fake=True,
            samples=0,
            values=recorder.values,
            ops=recorder.ops,
            calls=[],
            parameters={},
            buffers={},
            output=[ref.value for ref in refs if isinstance(ref, Ref)],
            loss=None,
            model_stop=len(recorder.ops),
        )
        graph = Graph(trace)
        cuts = {value: self.cuts[leaves[number]] for number, value in values.items() if leaves[number] in self.cuts}
        ops = [op for op in trace.ops if graph.live[op.number]]
        walk = follow(graph, ops, cuts, self.length)
        plain = all(step.is_plain for step in walk.steps)
        # What was made of sizes alone would come out for this rank's positions only.
        plain = plain and not any(op.outputs and not op.inputs for op in ops)
        return _Program(
            steps=tuple(walk.steps),
            inputs=tuple(values.items()),
            results=refs,
            shape=result_shape,
            walk=walk,
            shapes=tuple(value.shape for value in trace.values),
            is_plain=plain,
        )

    def _run(self, program: _Program, leaves: list[Any]) -> list[Any]:
        held: dict[int, Any] = {value: leaves[leaf] for leaf, value in program.inputs}
        for step in program.steps:
            operands = dict(held)
            for value in step.gathered:
                operands[value] = self._gathered(held[value], program.walk.cuts[value])
            for value, cut in step.sliced.items():
                operands[value] = self.own(operands[value], cut)
            results = self._run_step(step, operands, program)
            for value, result in zip(step.op.outputs, results, strict=True):
                held[value] = result
        return [held[known.value] if isinstance(known, Ref) else known for known in program.results]

    def _gathered(self, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        if x not in self.cuts:
            self.cuts[x] = cut
        full: torch.Tensor = self.full(x)
        return full

    def _run_step(self, step: PlacedOp, operands: dict[int, Any], program: _Program) -> list[Any]:
        op = step.op
        if step.attends:
            return [self._attend_fused(op, operands, program), *([None] * (len(op.outputs) - 1))]
        args, kwargs = tree_map(
            lambda leaf: operands[leaf.value] if isinstance(leaf, Ref) else leaf, (op.args, op.kwargs)
        )
        if op.name == "view" and not step.outputs and isinstance(args[1], (list, tuple)):
            return [_resized(op, args[0], list(args[1]))]  # Of something gathered, or made of it.
        if op.name in SIZED and step.outputs and isinstance(args[1], (list, tuple)):
            source, out = op.inputs[0], op.outputs[0]
            cut = step.outputs[out]
            whole = program.walk.cuts[source]
            local = cut.size * operands[source].shape[whole.dim] // whole.size
            sizes = [local if dim == cut.dim else size for dim, size in enumerate(program.shapes[out])]
            return [_resized(op, args[0], sizes)]
        result = op.overload(*args, **kwargs)
        return [leaf for leaf in tree_flatten(result)[0] if _is_tensor(leaf)]

    def _attend_fused(self, op: Op, operands: dict[int, Any], program: _Program) -> torch.Tensor:
        named = bind(op, []).named
        q, k, v = (operands[named[name].value] for name in ("query", "key", "value"))
        mask = named.get("attn_mask", named.get("attn_bias"))
        given = operands[mask.value] if isinstance(mask, Ref) else None
        if isinstance(mask, Ref) and mask.value in program.walk.cuts:
            given = self._gathered(given, program.walk.cuts[mask.value])
        return self._attend(
            q, k, v, given, bool(named["is_causal"]), named.get("scale"), as_called=False, dropout_p=named["dropout_p"]
        )

    def _attend_as_called(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A call of F.scaled_dot_product_attention; None if it is not of the sequence to itself, or drops weights."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = (given[name] for name in names[:3])
        if q.dim() != 4 or any(x not in self.cuts or self.cuts[x].dim != 2 for x in (q, k, v)):
            return None
        out = self._attend(
            q,
            k,
            v,
            self.full(given.get("attn_mask")),
            bool(given.get("is_causal")),
            given.get("scale"),
            enable_gqa=bool(given.get("enable_gqa")),
            dropout_p=given.get("dropout_p") or 0.0,
        )
        self.cuts[out] = self.cuts[q]
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        causal: bool,
        scale: Any,
        *,
        as_called: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        if mask is not None and self.cut.method == "ring" and mask.shape[-2] == self.length:
            mask = self.own(mask, Cut(mask.dim() - 2, (self.length,)))
        given = {"attn_mask": mask, "is_causal": causal, "scale": scale, **more}
        return self.cut.attend((q, k, v), given, as_called=as_called and not GlobalView.by_library)


def outside_global_view(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For code that hands a tensor on between ranks: it sees parts as they are, and its result is cut as the tensor it
    was given."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not GlobalView.active:
            return function(*args, **kwargs)
        view = GlobalView.active[-1]
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
            given = [x for x in tree_leaves((args, kwargs)) if _is_tensor(x) and x in view.cuts]
            if given and not any(result is x for x in given):
                view.cuts[result] = view.cuts[given[0]]
        return result

    return call


@contextmanager
def attention_of_library() -> Iterator[None]:
    """Around a call of attention in the place of a module of PyTorch's."""
    before, GlobalView.by_library = GlobalView.by_library, True
    try:
        yield
    finally:
        GlobalView.by_library = before


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _version(x: torch.Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _autocast() -> Any:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _resized(op: Op, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    # Parts need not lie in memory as the full sequence would: reshape copies where a view cannot be.
    return x.expand(sizes) if op.name == "expand" else x.reshape(sizes)


def _size(shape: tuple[int, ...], dim: int | None = None) -> Any:
    return torch.Size(shape) if dim is None else shape[dim]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


_OF_AUTOGRAD = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.requires_grad_,
}
"""They change the graph of a tensor and compute nothing: a hook belongs to the part."""

_SIZES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: _size,  # type: ignore[attr-defined]
    torch.Tensor.size: _size,
    torch.Tensor.numel: _numel,
    torch.Tensor.nelement: _numel,
    torch.numel: _numel,
    torch.Tensor.__len__: lambda shape: shape[0],
}
