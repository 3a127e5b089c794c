"""The largest elements of a tensor, by magnitude.

The tensor need not be sorted: a sample gives a threshold that a few more than k elements exceed, and
the exact choice is made among those. Where the sample misleads, all elements are looked at; the result is the same.
"""

from __future__ import annotations

import numpy as np
import torch

SAMPLE = 8192
WORTH_SAMPLING = 8 * SAMPLE


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` elements of the largest magnitude, NaN being the largest of all."""
    if count >= len(x):
        return torch.arange(len(x), device=x.device)
    magnitudes = x.abs()
    candidates = _probable(magnitudes, count)
    if candidates is None or len(candidates) < count:
        return magnitudes.topk(count, sorted=False).indices
    return candidates[magnitudes.index_select(0, candidates).topk(count, sorted=False).indices]


def largest_of_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count]: places in each row of its elements of the largest magnitude. In host memory numpy's partition
    takes a quarter of the time of torch's."""
    if rows.device.type == "cpu" and 0 < count < rows.shape[1]:
        places = np.argpartition(rows.abs().numpy(), rows.shape[1] - count, axis=1)
        return torch.from_numpy(places[:, rows.shape[1] - count :])
    return rows.abs().topk(count, dim=1, sorted=False).indices


def _probable(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Places among which the largest probably are, if that is worth finding out."""
    if len(magnitudes) < WORTH_SAMPLING or 4 * count > len(magnitudes):
        return None
    # An odd stride: an even one would see few columns of a matrix whose rows are a power of two long.
    sample = magnitudes[:: (len(magnitudes) // SAMPLE) | 1]
    expected = len(sample) * count / len(magnitudes)
    # Four standard deviations to the safe side.
    rank_in_sample = int(expected + 4 * expected**0.5) + 2
    if rank_in_sample > len(sample):
        return None
    threshold = sample.topk(rank_in_sample, sorted=False).values.min()
    return places_where(magnitudes >= threshold)


def places_where(mask: torch.Tensor) -> torch.Tensor:
    """The places of what is true, in their order. In host memory numpy finds them several times as fast."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)
