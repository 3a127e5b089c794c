"""How a cut dimension passes through operations that split or merge it.

A cut is the sizes of segments that are each split among the ranks. Merging an outer dimension of 3 with a cut one of 4
heads gives three segments of 4; viewing three segments of 32 as (3, 4, 8) leaves the 4 cut. A query-key-value matrix
cut as one segment cannot be divided in three: that is detected here, and the search repeats with three segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise

from shoal.layout.cuts import Cut
from shoal.layout.tensor.dims import BoundOp

Known = Mapping[int, Cut]
"""The cuts of other values found so far."""


class Refuted(ValueError):
    """A dimension cannot be cut: an operation needs all of it."""


class NeedsSegments(Exception):
    """A value can be cut along its dimension, but in finer segments."""

    def __init__(self, value: int, cut: Cut) -> None:
        super().__init__(value, cut)
        self.value = value
        self.cut = cut


def borders(segments: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(segments)]


def refined(segments: tuple[int, ...], at: set[int]) -> tuple[int, ...]:
    """The segments, divided further at the given positions."""
    places = sorted({*borders(segments), *at})
    return tuple(b - a for a, b in pairwise(places))


def between(cut: Cut, start: int, stop: int, *, value: int) -> Cut:
    """The segments of a range, if it begins and ends at borders."""
    places = borders(cut.segments)
    if start not in places or stop not in places:
        raise NeedsSegments(value, Cut(cut.dim, refined(cut.segments, {start, stop})))
    return Cut(cut.dim, cut.segments[places.index(start) : places.index(stop)])


def regrouped(cut: Cut, shape: tuple[int, ...], new: tuple[int, ...]) -> Cut | None:
    """The same cut after a view from `shape` to `new`; None if it is not a cut of one dimension there."""
    if shape == new:
        return cut
    for old_dims, new_dims in _factors(shape, new):
        if cut.dim in old_dims:
            at = old_dims.index(cut.dim)
            outer = math.prod(shape[d] for d in old_dims[:at])
            inner = math.prod(shape[d] for d in old_dims[at + 1 :])
            flat = tuple(segment * inner for segment in cut.segments) * outer
            found = [c for d in new_dims if (c := _as_cut_of(flat, d, new_dims, new)) is not None]
            return max(found, key=lambda c: math.gcd(*c.segments), default=None)
    return None


def _as_cut_of(flat: tuple[int, ...], dim: int, dims: list[int], shape: tuple[int, ...]) -> Cut | None:
    at = dims.index(dim)
    outer = math.prod(shape[d] for d in dims[:at])
    inner = math.prod(shape[d] for d in dims[at + 1 :])
    if len(flat) % outer:
        return None
    period = flat[: len(flat) // outer]
    if period * outer != flat or any(segment % inner for segment in period):
        return None
    segments = tuple(segment // inner for segment in period)
    return Cut(dim, segments) if sum(segments) == shape[dim] else None


def _factors(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes that hold the same elements."""
    if 0 in a or 0 in b:
        return []
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        left, right = [i], [j]
        size_a, size_b = a[i], b[j]
        i, j = i + 1, j + 1
        while size_a != size_b:
            if size_a < size_b and i < len(a):
                size_a, i = size_a * a[i], i + 1
                left.append(i - 1)
            elif j < len(b):
                size_b, j = size_b * b[j], j + 1
                right.append(j - 1)
            else:
                return []
        found.append((left, right))
    if found:
        found[-1][0].extend(range(i, len(a)))
        found[-1][1].extend(range(j, len(b)))
    return found


def view(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    other = call.out if value == call.op.inputs[0] else call.op.inputs[0]
    shape, new = call.shape(value), call.shape(other)
    if 0 in shape:
        return {}
    found = regrouped(cut, shape, new)
    if found is None:
        raise Refuted(f"a view of {list(shape)} as {list(new)} mixes the parts")
    return {other: found}


def select(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    """select and unbind: one entry of a dimension, or each of them."""
    source = call.op.inputs[0]
    at = call.dim(of=call.shape(source))
    if value == source:
        if cut.dim == at:
            raise NeedsSegments(source, Cut(at, (1,) * call.shape(source)[at]))
        return {v: Cut(cut.dim - (cut.dim > at), cut.segments) for v in call.op.outputs}
    return {source: Cut(cut.dim + (cut.dim >= at), cut.segments)}


def split(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    source = call.op.inputs[0]
    at = call.dim(of=call.shape(source))
    if cut.dim != at:
        return dict.fromkeys((source, *call.op.outputs), cut)
    sizes = [call.shape(v)[at] for v in call.op.outputs]
    if value != source:
        if source in known:
            return {}  # The input decides, and checks whether the outputs agree.
        parts = {**{v: Cut(at, (size,)) for v, size in zip(call.op.outputs, sizes, strict=True)}, **known, value: cut}
        return {source: Cut(at, sum((parts[v].segments for v in call.op.outputs), ()))}
    places = [0, *accumulate(sizes)]
    finer = refined(cut.segments, set(places))
    if finer != cut.segments:
        raise NeedsSegments(source, Cut(at, finer))
    return {
        v: between(cut, start, stop, value=source)
        for v, start, stop in zip(call.op.outputs, places, places[1:], strict=False)
        if stop > start
    }


def slice_range(call: BoundOp) -> tuple[int, int, int, int]:
    """(dimension, start, stop, step) of a slice, as positions."""
    shape = call.shape(call.op.inputs[0])
    at = call.dim(of=shape)
    start, stop, step = slice(call.named["start"], call.named["end"], call.named["step"]).indices(shape[at])
    return at, start, max(start, stop), step


def slice_(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    source, out = call.op.inputs[0], call.out
    at, start, stop, step = slice_range(call)
    other = out if value == source else source
    if cut.dim != at:
        return {other: cut}
    size = call.shape(source)[at]
    if step > 1:
        if start >= step or len(range(start, stop, step)) * step != size:
            raise Refuted(f"takes every {step}th entry of the dimension, from {start} to {stop} of {size}")
        if value == source:
            if any(segment % step for segment in cut.segments):
                raise Refuted(f"takes every {step}th entry of segments of {list(cut.segments)}")
            return {out: Cut(at, tuple(segment // step for segment in cut.segments))}
        return {source: Cut(at, tuple(segment * step for segment in cut.segments))}
    if value == source:
        return {out: between(cut, start, stop, value=source)} if stop > start else {}
    if source in known:
        return {}
    return {source: Cut(at, tuple(s for s in (start, *cut.segments, size - stop) if s))}


def cat(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    at = call.dim(of=call.shape(call.out))
    sources = [v for v in call.op.inputs if len(call.shape(v)) == len(call.shape(call.out))]
    if cut.dim != at:
        return dict.fromkeys((*sources, call.out), cut)
    sizes = {v: call.shape(v)[at] for v in sources}
    if value == call.out:
        found, start = {}, 0
        for v in sources:
            if sizes[v]:
                found[v] = between(cut, start, start + sizes[v], value=call.out)
            start += sizes[v]
        return found
    if call.out in known:
        return {}
    parts = {**{v: Cut(at, (size,)) for v, size in sizes.items() if size}, **known, value: cut}
    joined = sum((parts[v].segments for v in sources if sizes[v]), ())
    return {call.out: Cut(at, joined)}


def repeat(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    source = call.op.inputs[0]
    shape, out = call.shape(source), call.shape(call.out)
    new = len(out) - len(shape)
    if value == source:
        times = out[cut.dim + new] // shape[cut.dim]
        return {call.out: Cut(cut.dim + new, cut.segments * times)}
    if cut.dim < new or shape[cut.dim - new] == 1:
        return {}
    times = out[cut.dim] // shape[cut.dim - new]
    once = cut.segments[: len(cut.segments) // times]
    if once * times != cut.segments:
        raise Refuted(f"repeats {times} times what is cut as {list(cut.segments)}")
    return {source: Cut(cut.dim - new, once)}


def glu(call: BoundOp, value: int, cut: Cut, known: Known) -> dict[int, Cut]:
    """Multiplies one half of a dimension by a gate computed from the other."""
    source = call.op.inputs[0]
    at = call.dim(of=call.shape(source), default=-1)
    other = call.out if value == source else source
    if cut.dim != at:
        return {other: cut}
    if value != source:
        return {source: Cut(at, cut.segments * 2)}
    half = call.shape(source)[at] // 2
    first, second = (between(cut, start, start + half, value=source) for start in (0, half))
    if first.segments != second.segments:
        raise Refuted("gates one half by another that is cut differently")
    return {call.out: first}


STRUCTURAL: dict[str, Callable[[BoundOp, int, Cut, Known], dict[int, Cut]]] = {
    **dict.fromkeys("view _unsafe_view reshape _reshape_alias flatten squeeze unsqueeze".split(), view),
    **dict.fromkeys(["select", "unbind"], select),
    **dict.fromkeys("split split_with_sizes chunk unsafe_chunk unsafe_split unsafe_split_with_sizes".split(), split),
    "slice": slice_,
    "cat": cat,
    "repeat": repeat,
    "glu": glu,
}
