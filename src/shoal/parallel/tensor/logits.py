"""Logits that stay cut along the vocabulary, and look complete to all code.

A model may hand its logits to any code: the job's loss, a metric, a dataclass of its library. This tensor answers
questions about its shape for the full vocabulary, goes through views and slices of its other dimensions as it is,
computes a cross entropy on the parts, and is gathered first for anything else: never wrong, at worst slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from shoal.comm.mesh import Members
from shoal.layout.crossings import Tally
from shoal.layout.cuts import Cut
from shoal.parallel.collectives import gather_whole
from shoal.parallel.tensor.loss import cross_entropy
from shoal.parallel.tensor.regions import note

T = torch.Tensor


class CutLogits(torch.Tensor):
    """The storage is this rank's part; `vocabulary_dim` is the dimension that is cut."""

    members: Members
    tally: Tally
    vocabulary: int
    vocabulary_dim: int
    _whole: dict[bool, torch.Tensor]

    @staticmethod
    def around(part: torch.Tensor, *, dim: int, vocabulary: int, members: Members, tally: Tally) -> CutLogits:
        self = part.as_subclass(CutLogits)  # type: ignore[arg-type]
        self.members, self.tally, self.vocabulary = members, tally, vocabulary
        self.vocabulary_dim, self._whole = dim, {}
        return self

    def __repr__(self, **_: Any) -> str:
        # Sends nothing: user code may print on one rank only.
        return f"CutLogits(shape={tuple(self.whole_shape())}, part={self.part()!r})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def part(self) -> torch.Tensor:
        """This rank's part as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def like(self, part: torch.Tensor, dim: int) -> CutLogits:
        return CutLogits.around(part, dim=dim, vocabulary=self.vocabulary, members=self.members, tally=self.tally)

    def whole_shape(self) -> torch.Size:
        shape = list(self.part().shape)
        shape[self.vocabulary_dim] = self.vocabulary
        return torch.Size(shape)

    def gathered(self) -> torch.Tensor:
        """All ranks' parts as an ordinary tensor, gathered once."""
        known = self._whole.get(torch.is_grad_enabled())
        if known is None:
            part = self.part()
            longest = Cut(0, (self.vocabulary,)).local_size(self.members.size, 0)
            padded = part.narrow(self.vocabulary_dim, 0, 1).detach()
            note(self.tally, "gather_whole", padded, times=longest * self.members.size, gradient=part.requires_grad)
            known = gather_whole(part, self.members, self.vocabulary_dim, self.vocabulary)
            self._whole[torch.is_grad_enabled()] = known
        return known

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        handler = HANDLERS.get(func)
        if handler is not None and isinstance(first, CutLogits):
            others = [*args[1:], *(v for k, v in kwargs.items() if k != "input")]
            if not any(isinstance(leaf, CutLogits) for leaf in others):
                result = handler(first, func, args, kwargs)
                if result is not NotImplemented:
                    return result
        if isinstance(first, CutLogits) and _changes_it(func):
            raise ValueError(
                f"{func.__name__} would change logits that are cut among {first.members.size} ranks in place; "
                "use the form that gives a new tensor"
            )
        with torch._C.DisableTorchFunctionSubclass():
            plain = tree_map(lambda leaf: leaf.gathered() if isinstance(leaf, CutLogits) else leaf, (args, kwargs))
            return func(*plain[0], **plain[1])


def _changes_it(func: Any) -> bool:
    """Whether a call changes its first argument, or hangs something on it, rather than give a new tensor."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__set__", "__setitem__", "register_hook", "retain_grad") or name in AUGMENTED


AUGMENTED = tuple(f"__i{op}__" for op in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split())

Handler = Callable[[CutLogits, Any, Any, Any], Any]


def _on_part(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """A question whose answer is the same for a part as for the full tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(logits.part(), *args[1:], **kwargs)


def _piecewise(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy, or the same values in another precision."""
    return logits.like(_on_part(logits, func, args, kwargs), logits.vocabulary_dim)


def _size(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return logits.whole_shape() if dim is None else logits.whole_shape()[dim]


def _is_last(logits: CutLogits) -> bool:
    return logits.vocabulary_dim == len(logits.whole_shape()) - 1


def _reshape(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    shape = args[1:] or (kwargs.get("shape", kwargs.get("size")),)
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = tuple(shape[0])
    if not _is_last(logits) or not shape or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    rest = logits.whole_shape()[:-1].numel()
    known = 1
    for size in shape[:-1]:
        known *= size if size != -1 else 1
    # The last dimension must be the vocabulary and the others hold the rows, one of them perhaps left open.
    last_is_vocabulary = shape[-1] == logits.vocabulary or (shape[-1] == -1 and -1 not in shape[:-1])
    if not last_is_vocabulary or (known != rest if -1 not in shape[:-1] else known == 0 or rest % known):
        return NotImplemented
    part = logits.part()
    with torch._C.DisableTorchFunctionSubclass():
        changed = func(part, (*shape[:-1], part.shape[-1]))
    return logits.like(changed, changed.dim() - 1)


def _flatten(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    dims = len(logits.whole_shape())
    given = {"start_dim": 0, "end_dim": -1, **dict(zip(("start_dim", "end_dim"), args[1:], strict=False)), **kwargs}
    start, end = given["start_dim"], given["end_dim"]
    if not all(isinstance(dim, int) for dim in (start, end)) or not _is_last(logits):
        return NotImplemented
    if end % dims >= dims - 1 or start % dims > end % dims:
        return NotImplemented
    changed = logits.part().flatten(start % dims, end % dims)
    return logits.like(changed, changed.dim() - 1)


def _transpose(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(("dim0", "dim1"), args[1:], strict=False)), **kwargs}
    dims = len(logits.whole_shape())
    first, second = given["dim0"] % dims, given["dim1"] % dims
    moved = {first: second, second: first}.get(logits.vocabulary_dim, logits.vocabulary_dim)
    return logits.like(logits.part().transpose(first, second), moved)


def _permute(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    order = args[1:] or (kwargs["dims"],)
    order = tuple(order[0]) if isinstance(order[0], (tuple, list)) else order
    order = tuple(dim % len(order) for dim in order)
    return logits.like(logits.part().permute(order), order.index(logits.vocabulary_dim))


def _index(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing that leaves the vocabulary alone; the vocabulary must be the last dimension and stays it."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    dims = len(logits.whole_shape())
    used, after_dots, dots = 0, 0, False
    for entry in index:
        if entry is Ellipsis:
            if dots:
                return NotImplemented
            dots, after_dots = True, 0
        elif isinstance(entry, bool) or not (entry is None or isinstance(entry, (int, slice, torch.Tensor))):
            return NotImplemented
        elif entry is not None:
            taken = entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool else 1
            used, after_dots = used + taken, after_dots + taken
    reaches_last = (after_dots > 0) if dots else used >= dims
    untouched = isinstance(index[-1], slice) and index[-1] == slice(None)
    if not _is_last(logits) or used > dims or (reaches_last and not untouched) or (index and index[-1] is None):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        changed = func(logits.part(), args[1])
    return logits.like(changed, changed.dim() - 1)


def _cross_entropy(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target = given["target"]
    legacy = given.get("size_average") is not None or given.get("reduce") is not None
    in_place = logits.vocabulary_dim == (0 if len(logits.whole_shape()) == 1 else 1)
    if target.is_floating_point() or legacy or not in_place:
        return NotImplemented
    options = {name: given[name] for name in names[2:] if name in given and name not in ("size_average", "reduce")}
    return cross_entropy(
        logits.part(), target, classes=logits.vocabulary, members=logits.members, tally=logits.tally, **options
    )


def _numel(logits: CutLogits, func: Any, args: Any, kwargs: Any) -> int:
    return logits.whole_shape().numel()


ALIKE = (
    "ndim dtype device layout requires_grad is_leaf grad_fn is_cuda is_sparse is_nested is_quantized is_meta _version"
).split()
"""Properties that a part shares with the full tensor."""

HANDLERS: dict[Any, Handler] = {
    F.cross_entropy: _cross_entropy,
    T.size: _size,
    T.shape.__get__: _size,  # type: ignore[attr-defined]
    T.numel: _numel,
    T.nelement: _numel,
    torch.numel: _numel,
    T.__len__: lambda logits, *_: logits.whole_shape()[0],
    **dict.fromkeys((T.view, T.reshape, torch.reshape), _reshape),
    **dict.fromkeys((T.flatten, torch.flatten), _flatten),
    **dict.fromkeys((T.transpose, torch.transpose), _transpose),
    **dict.fromkeys((T.permute, torch.permute), _permute),
    T.__getitem__: _index,
    **dict.fromkeys(
        (
            T.float,
            T.double,
            T.half,
            T.bfloat16,
            T.to,
            T.type_as,
            T.cpu,
            T.contiguous,
            T.clone,
            torch.clone,
            T.detach,
            torch.detach,
        ),
        _piecewise,
    ),
    **dict.fromkeys(
        (
            T.dim,
            T.ndimension,
            T.element_size,
            T.is_floating_point,
            torch.is_floating_point,
            T.is_complex,
            torch.is_complex,
            T.is_contiguous,
            T.is_inference,
            *(getattr(T, name).__get__ for name in ALIKE),
        ),
        _on_part,
    ),
}
