"""For each ATen operation, what ranks that hold parts of a plane compute of it, and what they need for that.

A convolution cuts its output whatever lies before it; everything else keeps the cut that it is given. An operation
without a rule here is followed dimension by dimension, as for the other axes (`layout/global_view.py`), and what cannot
be followed gets its operands in full: so every sequence of operations runs, and only the traffic differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shoal.layout.global_view import FUSED_ATTENTION, CannotFollow, Walk, factors, step_of
from shoal.layout.recorded import Op
from shoal.layout.spatial.forms import AsCalled, Bins, Blocks, Form, Padded, Summed, Tapped, Taps, Windowed
from shoal.layout.spatial.grid import FULL, AxisCut, DimWindow, Grid, Move, Need, Part, window
from shoal.layout.spatial.windows import bins, convolution, cubic, hull, linear, mirrored, nearest, repeated, transposed
from shoal.layout.tensor.dims import BoundOp, bind
from shoal.layout.tensor.segments import slice_range
from shoal.layout.tensor.spread import Graph

Parts = Mapping[int, Part]


@dataclass(frozen=True, slots=True)
class PlaneStep:
    """One operation on parts."""

    op: Op
    moves: tuple[Move, ...] = ()
    """What happens to operands before it."""
    outputs: Mapping[int, Part] = field(default_factory=dict)
    form: Form = AsCalled()  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class _Case:
    """An operation with what is known of its operands."""

    graph: Graph
    grid: Grid
    op: Op
    parts: Parts
    used: frozenset[int]
    """Values that anything reads."""

    def bind(self) -> BoundOp:
        return bind(self.op, self.graph.values)

    def part(self, value: int) -> Part:
        return self.parts.get(value, FULL)

    def cut_inputs(self) -> list[int]:
        return [value for value in dict.fromkeys(self.op.inputs) if self.part(value) != FULL]


class _NotHere(Exception):
    """A rule does not fit; the operation is treated like any other."""


def plane_step(graph: Graph, grid: Grid, op: Op, parts: Parts, used: frozenset[int]) -> PlaneStep:
    """What ranks compute of one operation whose operands are cut as `parts` says."""
    case = _Case(graph, grid, op, parts, used)
    rule = RULES.get(op.name)
    if rule is not None and (op.name == "convolution" or case.cut_inputs()):
        try:
            return rule(case)
        except _NotHere:
            pass
    if not case.cut_inputs():
        return PlaneStep(op)
    if op.name in FUSED_ATTENTION:
        return _in_full(case)
    try:
        return _summed(case) or _by_dimension(case)
    except _Unsliceable:
        return _in_full(case)


def _in_full(case: _Case) -> PlaneStep:
    if case.op.overload._schema.is_mutable and case.op.inputs[0] in case.cut_inputs():
        raise CannotFollow(f"{case.op.module or 'the model'} ({case.op.name}) writes into a plane, in place")
    return PlaneStep(case.op, tuple(_gather(case, value) for value in case.cut_inputs()))


def _gather(case: _Case, value: int, axes: Sequence[int] = (0, 1)) -> Move:
    """All of a value along some axes."""
    needs: list[Need | None] = [None, None]
    for axis in axes:
        cut = case.part(value)[axis]
        if cut is not None:
            needs[axis] = Need(cut, case.grid.everything(axis, cut.length), held=True)
    return Move(value, (needs[0], needs[1]), case.part(value))


def _by_dimension(case: _Case) -> PlaneStep:
    """Each axis by itself: operands are gathered or sliced along it, and results are cut."""
    needs: dict[int, list[Need | None]] = {}
    outputs: dict[int, list[AxisCut | None]] = {}
    for axis in (0, 1):
        found = {v: cut for v in case.cut_inputs() if (cut := case.part(v)[axis]) is not None}
        if not found:
            continue
        # Lengths that meet in one operation without being each other's are no parts of one plane.
        length = max(cut.length for cut in found.values())
        walk = Walk(length, {v: cut.as_cut() for v, cut in found.items() if cut.length == length})
        step = step_of(case.graph, case.op, walk)
        whole = [v for v, cut in found.items() if v in step.gathered or cut.length != length or _counts(case, cut)]
        if any(v in whole and v not in step.gathered and found[v].length == length for v in found):
            step.outputs = {}
        for value in whole:
            need = Need(found[value], case.grid.everything(axis, found[value].length), held=True)
            needs.setdefault(value, [None, None])[axis] = need
        for value, each in step.sliced.items():
            if value in whole:
                raise _Unsliceable
            taken = AxisCut(each.dim, length, *factors(each, length))
            needs.setdefault(value, [None, None])[axis] = Need(taken, case.grid.owned(axis, length), held=False)
        for value, each in step.outputs.items():
            outputs.setdefault(value, [None, None])[axis] = AxisCut(each.dim, length, *factors(each, length))
    moves = tuple(Move(value, (rows, columns), case.part(value)) for value, (rows, columns) in needs.items())
    return PlaneStep(case.op, moves, {value: (rows, columns) for value, (rows, columns) in outputs.items()})


def _counts(case: _Case, cut: AxisCut) -> bool:
    """Whether an operation names places along the cut dimension, as they are in the full tensor."""
    if case.op.name not in ("slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"):
        return False
    call = case.bind()
    return call.dim(of=call.shape(case.op.inputs[0])) == cut.dim


class _Unsliceable(Exception):
    """An operand is needed in full along one dimension and in part along another."""


def _summed(case: _Case) -> PlaneStep | None:
    """An operation that sums over all that is cut: each rank's partial sum, added up over the ranks."""
    op, call = case.op, case.bind()
    given = case.cut_inputs()
    if op.name in ("sum", "mean"):
        shape = call.shape(op.inputs[0])
        dims = call.named.get("dim")
        every = [dims] if isinstance(dims, int) else dims or range(len(shape))
        reduced = {int(dim) % max(len(shape), 1) for dim in every}
        if any(cut is not None and cut.dim not in reduced for cut in case.part(given[0])):
            return None
        count = prod(shape[dim] for dim in reduced) if op.name == "mean" else 0
        return PlaneStep(op, form=Summed(count, _copies(case, given)))
    if op.name in ("mm", "bmm") and all(_contracts(case, value) for value in given):
        others = [value for value in op.inputs if value not in given]
        if not others:
            return PlaneStep(op, form=Summed(copies=_copies(case, given)))
    if op.name in LOSSES and int(call.named["reduction"]):
        part = case.part(given[0])
        if any(case.part(v) != part for v in given) or len({call.shape(v) for v in op.inputs}) > 1:
            return None
        own = [
            None if cut is None else Need(cut, case.grid.owned(axis, cut.length), held=False)
            for axis, cut in enumerate(part)
        ]
        moves = tuple(Move(v, (own[0], own[1])) for v in dict.fromkeys(op.inputs) if v not in given)
        mean = int(call.named["reduction"]) == 1
        form = Summed(prod(call.shape(given[0])) if mean else 0, _copies(case, given))
        return PlaneStep(op, moves, form=form)
    return None


def _contracts(case: _Case, value: int) -> bool:
    """Whether a product sums over all dimensions along which an operand is cut."""
    links = case.graph.links(case.op)
    assert links is not None
    places = [(value, cut.dim) for cut in case.part(value) if cut is not None]
    same = [group for group in links.contracted if places and places[0] in group]
    parts = {tuple((c.length, c.outer, c.inner) if c else None for c in case.part(v)) for v in case.cut_inputs()}
    return bool(same) and all(place in same[0] for place in places) and len(parts) == 1


def _copies(case: _Case, given: Sequence[int]) -> int:
    along = [any(case.part(value)[axis] is not None for value in given) for axis in (0, 1)]
    copies = 1
    for axis, cut in enumerate(along):
        copies *= 1 if cut else case.grid.sizes[axis]
    return copies


def _plane_cut(case: _Case, value: int, axis: int, first: int) -> AxisCut | None:
    """How an operand is cut along an axis; it must be in one of the dimensions from `first` on."""
    cut = case.part(value)[axis]
    if cut is not None and (not cut.is_plain or cut.dim < first):
        raise _NotHere
    return cut


def _windowed(
    case: _Case,
    value: int,
    first: int,
    reads: Callable[[int], Callable[[tuple[int, int]], tuple[int, int]]],
    *,
    enters: bool = False,
    form: Callable[[tuple[DimWindow, ...]], Form] = Windowed,
) -> PlaneStep:
    """An operation of which each output interval reads an interval of the input. `enters`: an operand that is there in
    full is cut here."""
    call = case.bind()
    shape, made = call.shape(value), call.shape(call.out)
    taken = {cut.dim for axis in (0, 1) if (cut := _plane_cut(case, value, axis, first)) is not None}
    needs: list[Need | None] = [None, None]
    cuts: list[AxisCut | None] = [None, None]
    windows = []
    for axis in (0, 1):
        cut = case.part(value)[axis]
        dim = cut.dim if cut is not None else (first, len(shape) - 1)[axis]
        if cut is None:
            if not enters or dim in taken or dim < first or not case.grid.splits(axis, made[dim]):
                continue
            taken.add(dim)
        found, is_cut = window(case.grid, axis, dim, (shape[dim], made[dim]), reads(dim))
        windows.append(found)
        needs[axis] = Need(AxisCut(dim, shape[dim]), found.have, held=cut is not None)
        cuts[axis] = AxisCut(dim, made[dim]) if is_cut else None
    if not windows:
        return PlaneStep(case.op)
    part: Part = (cuts[0], cuts[1])
    outputs = {out: part for out in case.op.outputs if len(call.shape(out)) == len(made)} if part != FULL else {}
    return PlaneStep(case.op, (Move(value, (needs[0], needs[1]), case.part(value)),), outputs, form(tuple(windows)))


def _each(given: Any, count: int, default: Sequence[int] | None = None) -> list[int]:
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    if not values:
        assert default is not None
        values = list(default)
    return [int(value) for value in (values * count if len(values) == 1 else values)]


def _convolution(case: _Case) -> PlaneStep:
    call = case.bind()
    source, weight = call.tensor("input"), call.tensor("weight")
    if source is None or weight is None or any(v != source.value for v in case.cut_inputs()):
        raise _NotHere
    dims = len(call.shape(source)) - 2
    stride, padding, dilation = (_each(call.named[name], dims) for name in ("stride", "padding", "dilation"))
    reads = transposed if call.named["transposed"] else convolution

    def along(dim: int) -> Callable[[tuple[int, int]], tuple[int, int]]:
        at = dim - 2
        return reads(kernel=call.shape(weight)[dim], stride=stride[at], padding=padding[at], dilation=dilation[at])

    return _windowed(case, source.value, 2, along, enters=True)


def _pooling(dims: int) -> Callable[[_Case], PlaneStep]:
    def rule(case: _Case) -> PlaneStep:
        call = case.bind()
        source = case.op.inputs[0]
        if any(out in case.used for out in case.op.outputs[1:]):
            raise _NotHere  # Indices count the elements of the full plane.
        first = len(call.shape(source)) - dims
        kernel = _each(call.named["kernel_size"], dims)
        stride = _each(call.named["stride"], dims, kernel)
        padding, dilation = _each(call.named["padding"], dims), _each(call.named.get("dilation", 1), dims)

        def along(dim: int) -> Callable[[tuple[int, int]], tuple[int, int]]:
            at = dim - first
            return convolution(kernel=kernel[at], stride=stride[at], padding=padding[at], dilation=dilation[at])

        return _windowed(case, source, first, along)

    return rule


def _padding(case: _Case) -> PlaneStep:
    call = case.bind()
    source, given = case.op.inputs[0], call.named["pad"]
    num = len(call.shape(source))

    def along(dim: int) -> Callable[[tuple[int, int]], tuple[int, int]]:
        place = 2 * (num - 1 - dim)
        before = int(given[place]) if place < len(given) else 0
        return lambda out: (out[0] - before, out[1] - before)

    return _windowed(case, source, 0, along, form=Padded)


def _taps(
    case: _Case,
    first: int,
    along: Callable[[int], tuple[list[list[int]], list[list[float]] | None] | None],
    *,
    others: bool,
) -> PlaneStep:
    call, source = case.bind(), case.op.inputs[0]
    shape, made = call.shape(source), call.shape(call.out)
    needs: list[Need | None] = [None, None]
    cuts: list[AxisCut | None] = [None, None]
    found = []
    for axis in (0, 1):
        cut = _plane_cut(case, source, axis, first)
        if cut is None:
            continue
        taps = along(cut.dim)
        if taps is None:
            cuts[axis] = cut
            continue
        rows, weights = taps
        if not made[cut.dim]:
            raise _NotHere
        windowed, is_cut = window(case.grid, axis, cut.dim, (shape[cut.dim], made[cut.dim]), hull(rows))
        found.append(
            Taps(
                axis,
                cut.dim,
                windowed.out,
                windowed.have,
                tuple(map(tuple, rows)),
                None if weights is None else tuple(map(tuple, weights)),
            )
        )
        needs[axis] = Need(cut, windowed.have, held=True)
        cuts[axis] = AxisCut(cut.dim, made[cut.dim]) if is_cut else None
    if not found:
        raise _NotHere
    part: Part = (cuts[0], cuts[1])
    left = others and len(found) < len(shape) - first
    outputs = {call.out: part} if part != FULL else {}
    move = Move(source, (needs[0], needs[1]), case.part(source))
    return PlaneStep(case.op, (move,), outputs, Tapped(tuple(found), left))


def _resizing(kind: str) -> Callable[[_Case], PlaneStep]:
    def rule(case: _Case) -> PlaneStep:
        call, source = case.bind(), case.op.inputs[0]
        shape, made = call.shape(source), call.shape(call.out)
        scales = [call.named.get(name) for name in _SCALES[len(shape) - 2]]

        def along(dim: int) -> tuple[list[list[int]], list[list[float]] | None]:
            length, size, scale = shape[dim], made[dim], scales[dim - 2]
            if kind in ("nearest", "exact"):
                return [nearest(length, size, scale, exact=kind == "exact")], None
            way = linear if kind == "linear" else cubic
            return way(length, size, scale, corners=bool(call.named["align_corners"]))

        return _taps(case, 2, along, others=True)

    return rule


_SCALES: dict[int, tuple[str, ...]] = {
    1: ("scales",),
    2: ("scales_h", "scales_w"),
    3: ("scales_d", "scales_h", "scales_w"),
}


def _mirroring(dims: int, rows: Callable[[int, int, int], list[int]]) -> Callable[[_Case], PlaneStep]:
    def rule(case: _Case) -> PlaneStep:
        call, source = case.bind(), case.op.inputs[0]
        shape, given = call.shape(source), call.named["padding"]

        def along(dim: int) -> tuple[list[list[int]], None]:
            place = 2 * (len(shape) - 1 - dim)
            return [rows(shape[dim], int(given[place]), int(given[place + 1]))], None

        return _taps(case, len(shape) - dims, along, others=True)

    return rule


def _slicing(case: _Case) -> PlaneStep:
    call = case.bind()
    at, start, stop, step = slice_range(call)

    def along(dim: int) -> tuple[list[list[int]], None] | None:
        return ([list(range(start, stop, step))], None) if dim == at else None

    return _taps(case, 0, along, others=False)


def _flipping(case: _Case) -> PlaneStep:
    call, source = case.bind(), case.op.inputs[0]
    shape = call.shape(source)
    dims = {int(dim) % len(shape) for dim in call.named["dims"]}
    if not all(any(cut is not None and cut.dim == dim for cut in case.part(source)) for dim in dims):
        raise _NotHere

    def along(dim: int) -> tuple[list[list[int]], None] | None:
        return ([list(range(shape[dim]))[::-1]], None) if dim in dims else None

    return _taps(case, 0, along, others=False)


def _adaptive(dims: int) -> Callable[[_Case], PlaneStep]:
    def rule(case: _Case) -> PlaneStep:
        call, source = case.bind(), case.op.inputs[0]
        shape, made = call.shape(source), call.shape(call.out)

        def along(dim: int) -> Callable[[tuple[int, int]], tuple[int, int]]:
            each = bins(shape[dim], made[dim])
            return lambda out: (each[out[0]][0], each[out[1] - 1][1])

        def form(windows: tuple[DimWindow, ...]) -> Form:
            return Bins(tuple((each, bins(shape[each.dim], made[each.dim])) for each in windows))

        return _windowed(case, source, len(shape) - dims, along, form=form)

    return rule


def _shuffling(*, up: bool) -> Callable[[_Case], PlaneStep]:
    def rule(case: _Case) -> PlaneStep:
        call, source = case.bind(), case.op.inputs[0]
        factor = int(call.named["upscale_factor" if up else "downscale_factor"])

        def along(dim: int) -> Callable[[tuple[int, int]], tuple[int, int]]:
            if up:
                return lambda out: (out[0] // factor, -(-out[1] // factor))
            return lambda out: (out[0] * factor, out[1] * factor)

        return _windowed(case, source, len(call.shape(source)) - 2, along, form=Blocks)

    return rule


def _likelihood(case: _Case) -> PlaneStep:
    """A negative log likelihood of planes of logits; its targets are cut as they are, without the classes."""
    call = case.bind()
    source, target = case.op.inputs[0], call.tensor("target")
    assert target is not None
    if call.tensor("weight") is not None and case.part(call.tensor("weight").value) != FULL:  # type: ignore[union-attr]
        raise _NotHere
    if case.part(source) == FULL or not int(call.named["reduction"]):
        raise _NotHere
    needs: list[Need | None] = [None, None]
    for axis in (0, 1):
        cut, known = case.part(source)[axis], case.part(target.value)[axis]
        if cut is None and known is None:
            continue
        if cut is None or cut.dim == 1:
            raise _NotHere
        wanted = AxisCut(cut.dim - (cut.dim > 1), cut.length, cut.outer, cut.inner)
        if known not in (None, wanted):
            raise _NotHere
        needs[axis] = None if known else Need(wanted, case.grid.owned(axis, cut.length), held=False)
    moves = (Move(target.value, (needs[0], needs[1])),) if needs != [None, None] else ()
    form = Summed(copies=_copies(case, [source]), weighted=int(call.named["reduction"]) == 1)
    return PlaneStep(case.op, moves, form=form)


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")

RULES: dict[str, Callable[[_Case], PlaneStep]] = {
    "convolution": _convolution,
    "max_pool2d_with_indices": _pooling(2),
    "max_pool3d_with_indices": _pooling(3),
    "avg_pool2d": _pooling(2),
    "avg_pool3d": _pooling(3),
    "_adaptive_avg_pool2d": _adaptive(2),
    "_adaptive_avg_pool3d": _adaptive(3),
    "constant_pad_nd": _padding,
    **dict.fromkeys(["upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"], _resizing("nearest")),
    **dict.fromkeys(
        ["_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"], _resizing("exact")
    ),
    **dict.fromkeys(["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"], _resizing("linear")),
    "upsample_bicubic2d": _resizing("cubic"),
    **{f"reflection_pad{dims}d": _mirroring(dims, mirrored) for dims in (1, 2, 3)},
    **{f"replication_pad{dims}d": _mirroring(dims, repeated) for dims in (1, 2, 3)},
    "slice": _slicing,
    "flip": _flipping,
    "pixel_shuffle": _shuffling(up=True),
    "pixel_unshuffle": _shuffling(up=False),
    **dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward"], _likelihood),
}
