"""How many devices each kind of parallelism could use on a network, and which share of the work it divides.

These are upper bounds from shapes alone: a sample, a layer, a head or a row of an image is the least that a device can
be given. Whether that number of devices pays off is a question of links and memory, and not answered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from shoal.analysis.convolution import Convolution
from shoal.analysis.network import Layer, Network
from shoal.analysis.products import AttentionProduct, FullyConnected, MatrixProduct
from shoal.analysis.reductions import BatchNorm, Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class Concurrency:
    """Of one axis. A degree of 1 is none: the network has nothing that this axis could cut."""

    axis: str
    """As in a strategy: dp, pp, tp, cp, ep, spatial."""
    title: str
    degree: int
    work_share: float
    """Of the forward's work, how much this axis divides."""
    words: str


def concurrency(network: Network) -> list[Concurrency]:
    """Every axis, also those that have nothing to cut."""
    return [
        Concurrency(
            axis="dp",
            title="data",
            degree=network.batch,
            work_share=1.0,
            words=_plural(network.batch, "sample") + " in the batch",
        ),
        _pipeline(network),
        _tensor(network),
        _context(network),
        _expert(network),
        _spatial(network),
    ]


def _pipeline(network: Network) -> Concurrency:
    learning = [
        name for name, numbers in network.blocks() if any(network.layers[number].operator.learns for number in numbers)
    ]
    words = (
        f"{_plural(len(learning), 'part')} with weights in series; they work at once on different micro-batches only"
    )
    return Concurrency(axis="pp", title="pipeline", degree=max(len(learning), 1), work_share=1.0, words=words)


def _tensor(network: Network) -> Concurrency:
    """Attention is cut by heads; without it the widest matrix or the most channels are the limit."""
    dense = _of(network, FullyConnected)
    convolutions = _of(network, Convolution)
    attention = _of(network, AttentionProduct)
    widest = max((max(each.inputs, each.outputs) for each in dense), default=0)
    channels = max((each.out_channels for each in convolutions), default=0)
    heads = max((each.heads for each in attention), default=0)
    words = []
    if heads:
        keys = min(each.kv_heads for each in attention)
        words.append(_plural(heads, "head") + (f" ({keys} of keys and values)" if keys != heads else ""))
    if channels:
        words.append(f"up to {channels:,} channels")
    if widest:
        words.append(f"a widest matrix of {widest:,}")
    share = _share(
        network,
        lambda layer: isinstance(layer.operator, FullyConnected | Convolution | AttentionProduct | MatrixProduct),
    )
    degree = heads or max(widest, channels, 1)
    return Concurrency(
        axis="tp",
        title="tensor",
        degree=degree,
        work_share=share,
        words=", ".join(words) or "no matrices",
    )


def _context(network: Network) -> Concurrency:
    length = max((each.queries for each in _of(network, AttentionProduct)), default=0)
    if not length:
        return Concurrency(axis="cp", title="context", degree=1, work_share=0.0, words="no attention over a sequence")
    positions = network.batch * length

    def by_position(layer: Layer) -> bool:
        operator: Any = layer.operator
        if isinstance(operator, AttentionProduct):
            return True
        sizes = (getattr(operator, name, None) for name in ("rows", "elements", "lookups"))
        size = next((size for size in sizes if size), 0)
        return layer.experts > 0 or (size > 0 and size % positions == 0)

    words = f"{_plural(length, 'position')} in a sequence"
    return Concurrency(axis="cp", title="context", degree=length, work_share=_share(network, by_position), words=words)


def _expert(network: Network) -> Concurrency:
    most = max((layer.experts for layer in network.layers), default=0)
    if most < 2:
        return Concurrency(axis="ep", title="expert", degree=1, work_share=0.0, words="no experts")
    return Concurrency(
        axis="ep",
        title="expert",
        degree=most,
        work_share=_share(network, lambda layer: layer.experts > 0),
        words=f"{most} experts in a layer",
    )


def _spatial(network: Network) -> Concurrency:
    """Only planes that a window slides over: a patch embedding or a 1x1 image is no plane to be cut."""
    planes = [
        prod(each.output)
        for each in _of(network, Convolution)
        if prod(each.output) > 1 and any(window > step for window, step in zip(each.kernel, each.stride, strict=True))
    ]
    if not planes:
        return Concurrency(axis="spatial", title="spatial", degree=1, work_share=0.0, words="no images to be cut")
    share = _share(
        network,
        lambda layer: isinstance(layer.operator, Convolution | Pooling | BatchNorm) and prod(layer.operator.image) > 1,
    )
    words = f"planes of {planes[0]:,} positions behind the first convolution, of {planes[-1]:,} behind the last"
    return Concurrency(axis="spatial", title="spatial", degree=max(planes), work_share=share, words=words)


def _of(network: Network, kind: type[Any]) -> list[Any]:
    return [layer.operator for layer in network.layers if isinstance(layer.operator, kind)]


def _share(network: Network, divided: Any) -> float:
    done = sum(layer.operator.forward().work for layer in network.layers if divided(layer))
    return done / max(network.forward.work, 1)


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
