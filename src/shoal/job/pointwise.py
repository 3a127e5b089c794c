"""Is an optimiser's step pointwise? Checked operation by operation: is each element computed from itself alone?

Comparing results is not enough. A norm may be computed but not used until it is large, and a branch on sizes may need
sizes that do not fit in memory. So the operations are intercepted: the first that is not pointwise and reads a
parameter, its gradient or anything computed from them is reported. In addition, steps are recorded on meta tensors, for
the parameters' true shapes and for slices: if the records differ, the optimiser depends on shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

KEEPS_ORDER = frozenset(
    {
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "reshape",
        "unsqueeze",
        "squeeze",
        "alias",
        "detach",
        "view_as_real",
        "view_as_complex",
        "_conj",
        "resolve_conj",
        "resolve_neg",
        "lift_fresh",
    }
)
"""Views that keep the order of elements in the flattened tensor."""
BY_ELEMENT = frozenset(
    {
        "fill",
        "zero",
        "copy",
        "clone",
        "_to_copy",
        "masked_fill",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "_local_scalar_dense",
        "set",
        "lift_fresh_copy",
        "item",
    }
)
"""Pointwise operations that PyTorch does not tag as pointwise, and operations that read no values."""
LENGTHS = (1, 7, 1000)
"""Lengths of slices whose steps are recorded, in addition to the engine's longest."""
STEPS = 3


class PointwiseCheck(TorchDispatchMode):
    """Finds the first operation that computes an element from others; with `recording`, records all operations."""

    def __init__(self, *, recording: bool = False) -> None:
        super().__init__()
        self._from = WeakIdKeyDictionary()
        self.odd = ""
        self.record: list[Any] = []
        self.recording = recording

    def follow(self, tensors: Iterable[Tensor | None]) -> None:
        """Marks these as computed from parameters."""
        for tensor in tensors:
            if tensor is not None:
                self._from[tensor] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        mine = [leaf for leaf in leaves if leaf in self._from]
        if mine and not self.odd and any(leaf.numel() > 1 for leaf in mine) and not by_element(func, args):
            self.odd = str(func.overloadpacket).removeprefix("aten.")
        name = str(func)
        if self.recording and not _keeps_order(func):
            self.record.append((name, *_numbers(args), *_numbers(named.values())))
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            if name.startswith("aten._fused_"):
                return None  # In place, and not implemented for meta tensors.
            if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
                return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **named)
        if mine:
            self.follow(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            written = args if name.startswith("aten._fused_") else args[:1]
            if name.startswith("aten._fused_") or func.overloadpacket.__name__.endswith("_"):
                self.follow(leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
        return out


def by_element(func: Any, args: Any) -> bool:
    """Whether an operation computes each element from elements at the same place only."""
    name = func.overloadpacket.__name__
    if name in ("index_put", "index_put_"):  # x[mask] = number
        masks = [index for index in args[1] if index is not None]
        return args[2].numel() == 1 and all(mask.dtype == torch.bool and mask.shape == args[0].shape for mask in masks)
    if name.startswith(("_foreach_", "_fused_")):
        return name not in ("_foreach_norm", "_foreach_max")
    known = torch.Tag.pointwise in func.tags or torch.Tag.nondeterministic_seeded in func.tags
    return known or _keeps_order(func) or name.removesuffix("_") in BY_ELEMENT


def _keeps_order(func: Any) -> bool:
    return func.overloadpacket.__name__.removesuffix("_") in KEEPS_ORDER


def _numbers(values: Iterable[Any]) -> list[Any]:
    """The numbers among the arguments, including scalar tensors; shapes are omitted."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (bool, int, float, complex)):
            found.append(value)
        elif isinstance(value, Tensor) and not value.dim() and not isinstance(value, FakeTensor):
            found.append(value.item())
        elif isinstance(value, FakeTensor) and value.constant is not None and not value.dim():
            found.append(value.constant.item())
        elif isinstance(value, (list, tuple)) and any(isinstance(entry, float) for entry in value):
            found.extend(value)
    return found


def looks_at_shapes(
    optimizer: OptimizerFactory, shapes: Iterable[tuple[str, tuple[int, ...], dict[str, Any], Any]], longest: int
) -> str:
    """Why steps on a parameter of its true shape differ from steps on slices; empty if they do not.

    `shapes`: for each parameter its name, shape, options and dtype; `longest`: the engine's longest slice.
    """
    known: list[tuple[dict[str, Any], Any, list[Any]]] = []
    for name, shape, options, dtype in shapes:
        try:
            own = _recorded(optimizer, shape, options, dtype)
            slices = next((row for wanted, kind, row in known if wanted == options and kind == dtype), None)
            if slices is None:
                slices = [_recorded(optimizer, (length,), options, dtype) for length in (*LENGTHS, longest)]
                known.append((options, dtype, slices))
        except Exception as error:
            return f"it cannot be tried on {name} as a meta tensor ({type(error).__name__}: {error})"
        if any(each != own for each in slices):
            return f"its steps on {name} of shape {list(shape)} differ from those on slices of it"
    return ""


def _recorded(optimizer: OptimizerFactory, shape: tuple[int, ...], options: dict[str, Any], dtype: Any) -> list[Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        param = nn.Parameter(torch.empty(shape, dtype=dtype))
        running = optimizer([{"params": [param], **options}])
        with PointwiseCheck(recording=True) as watch:
            for _ in range(STEPS):
                param.grad = torch.empty(shape, dtype=dtype)
                running.step()
    return watch.record
