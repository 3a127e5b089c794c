"""For each ATen operation, which dimensions of its operands correspond.

A dimension that a rule omits is needed in full (a softmax, a mean). Operations that split or merge a dimension are in
`segments.py`; an operation in neither file refutes any split that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.layout.recorded import Op, Ref, Value
from shoal.layout.tensor.dims import BoundOp, DimLinks, Place, aligned, bind


def links_of(op: Op, values: list[Value]) -> DimLinks | None:
    """The corresponding dimensions of an operation; None if there is no rule for it."""
    rule = RULES.get(op.name) or RULES.get(op.name.rstrip("_"))
    if rule is None and torch.Tag.pointwise in op.overload.tags:
        rule = elementwise
    return None if rule is None else rule(bind(op, values))


def elementwise(call: BoundOp) -> DimLinks:
    op = call.op
    out = call.shape(call.out)
    return aligned([(v, call.values[v].shape) for v in (*op.inputs, *op.outputs)], out)


def all_but(*names: str, default: int | None = None) -> Callable[[BoundOp], DimLinks]:
    """Same shape in and out; the named dimensions are needed in full."""

    def rule(call: BoundOp) -> DimLinks:
        shape = call.shape(call.op.inputs[0])
        whole: list[int] = []
        for name in names:
            given = call.named.get(name)
            given = default if given is None else given
            dims = range(len(shape)) if given is None else given if isinstance(given, (list, tuple)) else [given]
            whole += [int(dim) % max(len(shape), 1) for dim in dims]
        places = [(v, call.shape(v)) for v in (*call.op.inputs, *call.op.outputs) if len(call.shape(v)) == len(shape)]
        return aligned(places, shape, whole)

    return rule


def reduction(call: BoundOp) -> DimLinks:
    """Dimensions that are not reduced pass through; a reduced one is needed in full."""
    source = call.op.inputs[0]
    shape = call.shape(source)
    given = call.named.get("dim")
    dims = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    reduced = {int(dim) % max(len(shape), 1) for dim in dims} if dims else set(range(len(shape)))
    kept = [dim for dim in range(len(shape)) if dim not in reduced]
    links = DimLinks()
    for position, dim in enumerate(kept):
        outputs = [(v, dim if call.named.get("keepdim") else position) for v in call.op.outputs]
        links.carried.append([(source, dim), *outputs])
    return links


def permuted(order: Callable[[BoundOp, int], list[int]]) -> Callable[[BoundOp], DimLinks]:
    def rule(call: BoundOp) -> DimLinks:
        source = call.op.inputs[0]
        dims = order(call, len(call.shape(source)))
        return DimLinks(carried=[[(source, dim), (call.out, at)] for at, dim in enumerate(dims)])

    return rule


def _transposed(call: BoundOp, num: int) -> list[int]:
    dims = list(range(num))
    if num >= 2:
        a, b = (int(call.named[name]) % num for name in ("dim0", "dim1"))
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _product(a: int, b: int, out: int, *, batch: int) -> DimLinks:
    carried = [[(a, dim), (b, dim), (out, dim)] for dim in range(batch)]
    carried += [[(a, batch), (out, batch)], [(b, batch + 1), (out, batch + 1)]]
    return DimLinks(carried=carried, contracted=[[(a, batch + 1), (b, batch)]])


def product(call: BoundOp) -> DimLinks:
    """mm, bmm, addmm, baddbmm."""
    first, second = call.tensors("self", "mat1", "batch1", "mat2", "batch2")[-2:]
    out = call.shape(call.out)
    links = _product(first.value, second.value, call.out, batch=len(out) - 2)
    if call.op.name.rstrip("_") in ("addmm", "baddbmm"):
        added = call.named["self"].value
        for dim, size in enumerate(call.shape(added)):
            at = dim + len(out) - len(call.shape(added))
            if size == out[at] and size != 1:
                links.carried[_group_with(links, (call.out, at))].append((added, dim))
    return links


def _group_with(links: DimLinks, place: Place) -> int:
    return next(number for number, group in enumerate(links.carried) if place in group)


def matrix_vector(call: BoundOp) -> DimLinks:
    matrix, vector = call.tensors("self", "mat", "vec")[-2:]
    links = DimLinks(carried=[[(matrix.value, 0), (call.out, 0)]], contracted=[[(matrix.value, 1), (vector.value, 0)]])
    if call.op.name == "addmv":
        links.carried[0].append((call.named["self"].value, 0))
    return links


def convolution(call: BoundOp) -> DimLinks:
    source, weight, bias = call.tensor("input"), call.tensor("weight"), call.tensor("bias")
    assert source is not None
    assert weight is not None
    groups, transposed = int(call.named["groups"]), bool(call.named["transposed"])
    into, outof = (0, 1) if transposed else (1, 0)
    if groups == 1:
        links = DimLinks(contracted=[[(source.value, 1), (weight.value, into)]])
        channels: list[Place] = [(weight.value, outof), (call.out, 1)]
    else:
        # Groups are independent, so a rank can hold some of them, with their inputs and outputs.
        channels = [(source.value, 1), (weight.value, 0), (call.out, 1)]
        links = DimLinks(indivisible={place: call.values[place[0]].shape[place[1]] // groups for place in channels})
    if bias is not None:
        channels.append((bias.value, 0))
    links.carried += [channels, [(source.value, 0), (call.out, 0)]]
    return links


def batch_norm(call: BoundOp) -> DimLinks:
    """Channels pass through. All samples are needed, for their mean."""
    source = call.op.inputs[0]
    vectors = [(v, 0) for v in (*call.op.inputs[1:], *call.op.outputs[1:]) if len(call.shape(v)) == 1]
    width = call.shape(source)[1]
    vectors = [place for place in vectors if call.shape(place[0])[0] == width]
    return DimLinks(carried=[[(source, 1), (call.out, 1), *vectors]])


def layer_norm(call: BoundOp) -> DimLinks:
    source = call.op.inputs[0]
    kept = len(call.shape(source)) - len(call.named["normalized_shape"])
    return DimLinks(carried=[[(v, dim) for v in (source, *call.op.outputs)] for dim in range(kept)])


def group_norm(call: BoundOp) -> DimLinks:
    source, groups = call.op.inputs[0], int(call.named["group"])
    channels: list[Place] = [(source, 1), (call.out, 1)]
    channels += [(ref.value, 0) for ref in call.tensors("weight", "bias")]
    together = call.shape(source)[1] // groups
    samples = [(v, 0) for v in (source, *call.op.outputs)]
    moments = [(v, 1) for v in call.op.outputs[1:]]
    return DimLinks(carried=[channels + moments, samples], indivisible=dict.fromkeys(channels, together))


def attention(call: BoundOp) -> DimLinks:
    """Samples and heads are independent. Fewer key-value heads than heads are split in proportion."""
    read = call.tensors("query", "key", "value")
    links = DimLinks(
        carried=[[(ref.value, dim) for ref in read] + [(v, dim) for v in call.op.outputs[:2]] for dim in (0, 1)]
    )
    mask = call.tensor("attn_mask")
    if mask is not None:
        shape = call.shape(mask)
        for dim in range(len(shape) - 2):
            if shape[dim] != 1:
                links.carried[dim + 4 - len(shape)].append((mask.value, dim))
    return links


def leading(trailing: int) -> Callable[[BoundOp], DimLinks]:
    """All but the last few dimensions: pooling, interpolation, triangles."""

    def rule(call: BoundOp) -> DimLinks:
        source = call.op.inputs[0]
        dims = range(len(call.shape(source)) - trailing)
        return DimLinks(carried=[[(source, dim), *((v, dim) for v in call.op.outputs)] for dim in dims])

    return rule


def pad(call: BoundOp) -> DimLinks:
    source = call.op.inputs[0]
    shape, given = call.shape(source), call.named["pad"]
    padded = {len(shape) - 1 - number // 2 for number, size in enumerate(given) if size}
    return DimLinks(carried=[[(source, d), (call.out, d)] for d in range(len(shape)) if d not in padded])


def embedding(call: BoundOp) -> DimLinks:
    weight, indices = call.named["weight"].value, call.named["indices"].value
    num = len(call.shape(indices))
    links = DimLinks(carried=[[(indices, dim), (call.out, dim)] for dim in range(num)])
    links.carried.append([(weight, 1), (call.out, num)])
    return links


def index(call: BoundOp) -> DimLinks:
    """Dimensions that are not indexed, if the indexed ones are adjacent."""
    source, indices = call.named["self"].value, call.named["indices"]
    given = [at for at, entry in enumerate(indices) if isinstance(entry, Ref)]
    if given != list(range(given[0], given[-1] + 1)):
        return DimLinks()
    made = len(call.shape(call.out)) - len(call.shape(source)) + len(given)
    links = DimLinks()
    for dim in range(len(call.shape(source))):
        if dim not in given:
            links.carried.append([(source, dim), (call.out, dim if dim < given[0] else dim - len(given) + made)])
    return links


def along_others(call: BoundOp) -> DimLinks:
    """gather, scatter, index_add and similar: every dimension but the one they act along."""
    shape = call.shape(call.op.inputs[0])
    acting = call.dim(of=shape)
    places = [(v, call.shape(v)) for v in (*call.op.inputs, *call.op.outputs) if len(call.shape(v)) == len(shape)]
    return aligned(places, call.shape(call.out), [acting])


def expand(call: BoundOp) -> DimLinks:
    source = call.op.inputs[0]
    return aligned([(source, call.shape(source)), (call.out, call.shape(call.out))], call.shape(call.out))


def uniform(call: BoundOp) -> DimLinks:
    """Created from a size and a number: any part of it looks like the full tensor."""
    return DimLinks(carried=[[(v, dim)] for v in call.op.outputs for dim in range(len(call.shape(v)))])


def stack(call: BoundOp) -> DimLinks:
    out = call.shape(call.out)
    at = call.dim(of=out)
    sources = call.op.inputs
    kept = [dim for dim in range(len(out)) if dim != at]
    return DimLinks(carried=[[(call.out, dim), *((v, n) for v in sources)] for n, dim in enumerate(kept)])


RULES: dict[str, Callable[[BoundOp], DimLinks]] = {
    **dict.fromkeys(
        "clone detach alias _to_copy contiguous lift_fresh copy fill zero bernoulli native_dropout dropout where "
        "masked_fill rsub zeros_like ones_like empty_like full_like rand_like randn_like log_sigmoid_forward "
        "_prelu_kernel hardswish rrelu_with_noise random normal uniform isin".split(),
        elementwise,
    ),
    **dict.fromkeys(
        "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp sort argsort".split(),
        all_but("dim", default=-1),
    ),
    **dict.fromkeys(["flip", "roll"], all_but("dims")),
    "topk": along_others,
    **dict.fromkeys(
        "mean sum amax amin prod var std var_mean std_mean logsumexp any all argmax argmin max min median norm "
        "linalg_vector_norm count_nonzero nansum".split(),
        reduction,
    ),
    "t": permuted(lambda call, num: list(range(num))[::-1]),
    "transpose": permuted(_transposed),
    "permute": permuted(lambda call, num: [int(dim) % num for dim in call.named["dims"]]),
    **dict.fromkeys(["mm", "addmm", "bmm", "baddbmm"], product),
    **dict.fromkeys(["mv", "addmv"], matrix_vector),
    "convolution": convolution,
    **dict.fromkeys(["native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"], batch_norm),
    **dict.fromkeys(["native_layer_norm", "_fused_rms_norm", "rms_norm"], layer_norm),
    "native_group_norm": group_norm,
    **dict.fromkeys(
        [
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        ],
        attention,
    ),
    **dict.fromkeys(
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d "
        "upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa tril triu "
        "reflection_pad2d replication_pad2d".split(),
        leading(2),
    ),
    **dict.fromkeys(["avg_pool1d", "_adaptive_avg_pool1d", "upsample_nearest1d", "upsample_linear1d"], leading(1)),
    **dict.fromkeys(
        ["max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d", "upsample_nearest3d"], leading(3)
    ),
    "constant_pad_nd": pad,
    "embedding": embedding,
    "index": index,
    **dict.fromkeys("gather index_select scatter scatter_add index_add index_copy index_fill".split(), along_others),
    "expand": expand,
    **dict.fromkeys("zeros ones full empty scalar_tensor new_zeros new_ones new_full new_empty".split(), uniform),
    "stack": stack,
}
