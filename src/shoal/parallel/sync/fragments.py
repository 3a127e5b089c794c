"""Fragments of a model that are exchanged at different steps (Streaming DiLoCo).

A layer is a parameter's path up to its first number ("blocks.3"), or the module that it is in where there is none. The
layers, in the order of the model, go to the fragments in turn: neighbouring layers are exchanged far from each other in
time. All of it follows from the names of the full model's parameters, so all ranks agree without a message, also where
each holds some of the layers only.

Fragment p of P is sent after the steps that are (p + 1) h / P more than a multiple of h, rounded down: every h steps,
the last one when all would be without fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from shoal.parallel.bucket import Bucket


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)


def fragments_of(names: Sequence[str], fragments: int) -> list[list[str]]:
    """The parameters of each fragment, from those of the full model in its order."""
    layers = list(dict.fromkeys(map(layer_of, names)))
    found: list[list[str]] = [[] for _ in range(fragments)]
    for name in names:
        found[layers.index(layer_of(name)) % fragments].append(name)
    return found


def sent_after(fragment: int, fragments: int, h: int) -> int:
    """The step of a period, from 1 to h, after which a fragment is sent."""
    return (fragment + 1) * h // fragments


class Portion:
    """The part of this rank's slices that belongs to one fragment: ranges of each bucket's master."""

    def __init__(self, names: Sequence[str], buckets: Sequence[Bucket]) -> None:
        self.names = list(names)
        """Of the full model."""
        self.apart = 0.0
        """Square of this island's distance from the mean of all at its last round; it is sent with the next one."""
        self.ranges = [_ranges(set(names), bucket) for bucket in buckets]

    def views(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The ranges of values that are laid out as the masters are, one after the other."""
        return [flat[low:high] for flat, ranges in zip(values, self.ranges, strict=True) for low, high in ranges]

    def split(self, joined: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same of what `join` gave."""
        found: list[torch.Tensor] = []
        for flat, ranges in zip(joined, [each for each in self.ranges if each], strict=True):
            found += flat.split([high - low for low, high in ranges])
        return found

    def empty(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for its ranges, one flat tensor for each bucket that has some: in float32 at least, since what is sent
        is a sum of differences times counts."""
        import torch

        return [
            torch.empty(
                sum(high - low for low, high in ranges),
                device=flat.device,
                dtype=torch.promote_types(flat.dtype, torch.float32),
            )
            for flat, ranges in zip(values, self.ranges, strict=True)
            if ranges
        ]


def _ranges(names: set[str], bucket: Bucket) -> list[tuple[int, int]]:
    """Stretches of parameters of the fragment in this rank's shard, each with the padding that follows it."""
    slots, shard = bucket.buffer.slots, bucket.buffer.shard
    found: list[tuple[int, int]] = []
    for (slot, start), (_, end) in pairwise([*((s, s.start) for s in slots), (None, bucket.buffer.padded)]):
        low, high = max(start, shard.start) - shard.start, min(end, shard.stop) - shard.start
        if slot is None or slot.name not in names or low >= high:
            continue
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found
