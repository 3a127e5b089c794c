"""Threshold: every element whose magnitude reaches t, with its place. How many these are is up to the data."""

from __future__ import annotations

import torch

from shoal.comm.compress.codec import SparseCodec
from shoal.comm.compress.given import Draw
from shoal.comm.compress.topk import places_where


class Threshold(SparseCodec):
    """Elements of magnitude t and more."""

    def __init__(self, *, least: float) -> None:
        self.least = least

    def choose(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        # A threshold too small for the tensor's type would become zero, and send the zeros, too.
        least = max(self.least, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps)
        # Not "is at least t": what is no number must be sent, or it would stay in the residual for ever.
        return places_where((x.abs() < least).logical_not_())
