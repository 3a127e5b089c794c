"""What a rank computes of an operation, from the parts that it holds and has fetched.

What lies beyond the edges of a plane is padded here, by the values that the operation would pad with; the operation
then runs without padding along the cut dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_map

from shoal.layout.global_view import SIZED
from shoal.layout.recorded import Op, Ref
from shoal.layout.spatial.forms import AsCalled, Bins, Blocks, Padded, Summed, Tapped, Taps, Windowed
from shoal.layout.spatial.grid import FULL, DimWindow, Grid
from shoal.layout.spatial.program import Program
from shoal.layout.spatial.rules import PlaneStep
from shoal.layout.tensor.dims import bind
from shoal.parallel.spatial.exchange import Beyond

Place = tuple[int, int]


def computed(step: PlaneStep, operands: Mapping[int, Any], program: Program, grid: Grid, place: Place) -> list[Any]:
    """The results of one operation on this rank; of a sum, this rank's share."""
    op, form = step.op, step.form
    args, kwargs = tree_map(lambda leaf: operands[leaf.value] if isinstance(leaf, Ref) else leaf, (op.args, op.kwargs))
    if isinstance(form, AsCalled):
        if op.name in SIZED and isinstance(args[1], (list, tuple)) and any(p != FULL for p in step.outputs.values()):
            out = op.outputs[0]
            sizes = list(grid.local_shape(program.values[out].shape, program.parts.get(out, FULL), place))
            # Parts need not lie in memory as the full tensor would: reshape copies where a view cannot be.
            return [args[0].expand(sizes) if op.name == "expand" else args[0].reshape(sizes)]
        return _tensors(op.overload(*args, **kwargs))
    named = {
        name: operands[value.value] if isinstance(value, Ref) else value
        for name, value in bind(op, list(program.values)).named.items()
    }
    if isinstance(form, Windowed):
        return _windowed(op, named, form, place)
    if isinstance(form, Padded):
        return [_padded(named["self"], named["pad"], float(named["value"]), form, place)]
    if isinstance(form, Tapped):
        return [_tapped(op, named, form, program.values[op.outputs[0]].shape, place)]
    if isinstance(form, Bins):
        return [_bins(op, named, form, place)]
    if isinstance(form, Blocks):
        return [_blocks(op, args, named, form, place)]
    return _summed(op, args, named, form, place)


def _tensors(result: Any) -> list[Any]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]


def _each(given: Any, count: int) -> list[int]:
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    return values * count if len(values) == 1 else values


def _beyond(window: DimWindow, at: int) -> tuple[int, int]:
    """Inputs that do not exist, in front and behind."""
    (low, high), (first, last) = window.span[at], window.have[at]
    if first >= last:
        return high - low, 0
    return first - low, high - last


def padding_of(step: PlaneStep, dtype: torch.dtype, place: Place) -> Beyond | None:
    """What an operation pads its input with."""
    if not isinstance(step.form, Windowed):
        return None
    sizes = {window.axis: _beyond(window, place[window.axis]) for window in step.form.dims}
    value = _lowest(dtype) if step.op.name.startswith("max_pool") else 0.0
    return Beyond((sizes.get(0, (0, 0)), sizes.get(1, (0, 0))), value)


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _filled(x: torch.Tensor, windows: tuple[DimWindow, ...], place: Place, value: float) -> torch.Tensor:
    """With padding, unless it came with it (`padding_of`)."""
    pads = [0] * (2 * x.dim())
    for window in windows:
        low, high = window.span[place[window.axis]]
        if x.shape[window.dim] == high - low:
            continue
        before, behind = _beyond(window, place[window.axis])
        at = 2 * (x.dim() - 1 - window.dim)
        pads[at], pads[at + 1] = before, behind
    return F.pad(x, pads, value=value) if any(pads) else x


def _windowed(op: Op, named: dict[str, Any], form: Windowed, place: Place) -> list[Any]:
    if op.name == "convolution":
        return [_convolved(op, named, form, place)]
    if op.name.startswith("max_pool"):
        return _pooled(op, named, form, place)
    return [_averaged(op, named, form, place)]


def _convolved(op: Op, named: dict[str, Any], form: Windowed, place: Place) -> torch.Tensor:
    x, dims = named["input"], named["input"].dim() - 2
    padding, further = list(_each(named["padding"], dims)), list(_each(named["output_padding"], dims))
    stride = _each(named["stride"], dims)
    crops = []
    for window in form.dims:
        at = window.dim - 2
        if named["transposed"]:
            (low, _), (first, last) = window.span[place[window.axis]], window.out[place[window.axis]]
            crops.append((window.dim, first - (low * stride[at] - padding[at]), last - first))
        padding[at] = further[at] = 0
    x = _filled(x, form.dims, place, 0.0)
    y: torch.Tensor = torch.ops.aten.convolution.default(
        x,
        named["weight"],
        named["bias"],
        stride,
        padding,
        named["dilation"],
        named["transposed"],
        further,
        named["groups"],
    )
    for dim, start, size in crops:
        y = y.narrow(dim, start, size)
    return y


def _pooled(op: Op, named: dict[str, Any], form: Windowed, place: Place) -> list[Any]:
    x = named["self"]
    dims = 3 if "3d" in op.name else 2
    padding = list(_each(named["padding"], dims))
    for window in form.dims:
        padding[window.dim - (x.dim() - dims)] = 0
    x = _filled(x, form.dims, place, _lowest(x.dtype))
    stride = named["stride"] or named["kernel_size"]
    result = op.overload(x, named["kernel_size"], stride, padding, named["dilation"], named["ceil_mode"])
    return _tensors(result)


def _averaged(op: Op, named: dict[str, Any], form: Windowed, place: Place) -> torch.Tensor:
    """Sums of windows, divided by how many elements count in each."""
    x = named["self"]
    dims = 3 if "3d" in op.name else 2
    first = x.dim() - dims
    kernel, padding = _each(named["kernel_size"], dims), list(_each(named["padding"], dims))
    stride = _each(named["stride"] or named["kernel_size"], dims)
    full = list(padding)
    for window in form.dims:
        padding[window.dim - first] = 0
    sizes = [x.shape[first + at] for at in range(dims)]
    x = _filled(x, form.dims, place, 0.0)
    total = op.overload(x, kernel, stride, padding, named["ceil_mode"], True, 1)
    if named["divisor_override"]:
        return total / named["divisor_override"]  # type: ignore[no-any-return]
    cut = {window.dim - first: window for window in form.dims}
    for at in range(dims):
        shape = [1] * x.dim()
        shape[first + at] = -1
        length = cut[at].length if at in cut else sizes[at]
        made = cut[at].out[place[cut[at].axis]] if at in cut else (0, total.shape[first + at])
        starts = torch.arange(*made) * stride[at] - full[at]
        if named["count_include_pad"]:
            counts = (starts + kernel[at]).clamp(max=length + full[at]) - starts
        else:
            counts = (starts + kernel[at]).clamp(max=length) - starts.clamp(min=0)
        total = total / counts.view(shape).to(total.device, total.dtype)
    return total  # type: ignore[no-any-return]


def _padded(x: torch.Tensor, given: Any, value: float, form: Padded, place: Place) -> torch.Tensor:
    pads = [*given, *[0] * (2 * x.dim() - len(given))]
    for window in form.dims:
        at = 2 * (x.dim() - 1 - window.dim)
        pads[at], pads[at + 1] = _beyond(window, place[window.axis])
    return F.pad(x, pads, value=value)


def _tapped(op: Op, named: dict[str, Any], form: Tapped, shape: tuple[int, ...], place: Place) -> torch.Tensor:
    x = named["self"] if "self" in named else named["input"]
    for taps in form.taps:
        x = _tap(x, taps, place[taps.axis])
    if not form.others:
        return x
    along = {taps.dim for taps in form.taps}
    if "output_size" in named:
        sizes = [x.shape[dim] if dim in along else shape[dim] for dim in range(2, x.dim())]
        scales = {
            name: None if 2 + at in along else named[name]
            for at, name in enumerate(name for name in named if name.startswith("scales"))
        }
        kept = {name: value for name, value in named.items() if name not in ("self", "input", "output_size", *scales)}
        return op.overload(x, sizes, *kept.values(), *scales.values())  # type: ignore[no-any-return]
    pads = list(named["padding"])
    for dim in along:
        at = 2 * (x.dim() - 1 - dim)
        pads[at] = pads[at + 1] = 0
    return op.overload(x, pads)  # type: ignore[no-any-return]


def _tap(x: torch.Tensor, taps: Taps, at: int) -> torch.Tensor:
    first, last = taps.out[at]
    start = taps.have[at][0]
    total = None
    for number, rows in enumerate(taps.rows):
        read = rows[first:last]
        if read == tuple(range(read[0], read[0] + len(read))):
            taken = x.narrow(taps.dim, read[0] - start, len(read))
        else:
            taken = x.index_select(taps.dim, torch.tensor(read, device=x.device) - start)
        if taps.weights is None:
            return taken.contiguous() if taken is x else taken
        shape = [1] * x.dim()
        shape[taps.dim] = -1
        weights = torch.tensor(taps.weights[number][first:last], dtype=x.dtype, device=x.device).view(shape)
        total = taken * weights if total is None else total + taken * weights
    assert total is not None
    return total


def _bins(op: Op, named: dict[str, Any], form: Bins, place: Place) -> torch.Tensor:
    x = named["self"]
    sizes = list(named["output_size"])
    first = x.dim() - len(sizes)
    for window, bins in form.dims:
        low, high = window.out[place[window.axis]]
        start = window.have[place[window.axis]][0]
        means = [x.narrow(window.dim, a - start, b - a).mean(window.dim, keepdim=True) for a, b in bins[low:high]]
        x = torch.cat(means, window.dim)
        sizes[window.dim - first] = high - low
    return op.overload(x, sizes)  # type: ignore[no-any-return]


def _blocks(op: Op, args: Any, named: dict[str, Any], form: Blocks, place: Place) -> torch.Tensor:
    y: torch.Tensor = op.overload(*args)
    if "upscale_factor" not in named:
        return y
    for window in form.dims:
        first, last = window.out[place[window.axis]]
        start = window.have[place[window.axis]][0] * int(named["upscale_factor"])
        y = y.narrow(window.dim, first - start, last - first)
    return y


def _summed(op: Op, args: Any, named: dict[str, Any], form: Summed, place: Place) -> list[Any]:
    if "reduction" not in named:
        total = op.overload(*args)
        if form.count:
            total = total * (named["self"].numel() // max(1, total.numel()) / form.count)
        return [_share(total, form, place)]
    if op.name.startswith("nll_loss"):
        return [_share(x, form, place) for x in _tensors(op.overload(*{**named, "reduction": 2}.values()))]
    total = op.overload(*{**named, "reduction": 0}.values()).sum()
    return [_share(total / form.count if form.count else total, form, place)]


def _share(total: torch.Tensor, form: Summed, place: Place) -> torch.Tensor:
    """Of ranks that hold the same part each contributes a fraction; of whole numbers, the first all of it."""
    if form.copies == 1:
        return total
    if total.is_floating_point():
        return total / form.copies
    return total * int(not any(place))
