"""Fused kernels of optimisers are taken only where they compute what the plain ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.parallel.fused import prefer_fused

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"eps": 1e-4},
    "AdamW": {"eps": 1e-4},
    "Adagrad": {},
    "NAdam": {"eps": 1e-4},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_preferred_updates_as_the_plain_optimiser_does(name: str, dtype: torch.dtype) -> None:
    """The fused SGD of PyTorch 2.13 leaves half-precision parameters where they are."""
    draw = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(100, generator=draw), [torch.randn(100, generator=draw) for _ in range(5)]

    def trained(fused: bool) -> torch.Tensor:
        param = nn.Parameter(start.to(dtype, copy=True))
        optimizer = getattr(torch.optim, name)([param], lr=0.05, **OPTIMIZERS[name])
        if fused:
            prefer_fused(optimizer)
        for gradient in gradients:
            param.grad = gradient.to(dtype)
            optimizer.step()
        return param.detach().double()

    expected = trained(fused=False)
    assert float((expected - start).abs().max()) > 0.1
    assert float((trained(fused=True) - expected).abs().max()) <= 4 * torch.finfo(dtype).eps
