"""Wrong tensor parallelism, planted on purpose: each function breaks it in its rank and then runs the proof.

`arguments["decoder"]`, where given, are the settings of the small language model in tensor_targets, to which the fault
is then shown instead of a whole job.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

import shoal.parallel.tensor.cut as tensor
import shoal.parallel.tensor.regions as regions
import shoal.parallel.tensor.vocabulary as vocabulary
from distributed import tensor_targets
from shoal.proof.entry import parallel_run


def _proof(arguments: dict[str, Any], channel: Any) -> Any:
    if "decoder" in arguments:
        return tensor_targets.decoder(arguments["decoder"], channel)
    return parallel_run(arguments, channel)


def no_fault(arguments: dict[str, Any], channel: Any) -> Any:
    return _proof(arguments, channel)


def unreduced_norm(arguments: dict[str, Any], channel: Any) -> Any:
    """With the sequence cut, norms between regions keep the gradient of this rank's positions alone."""
    honest = tensor.partial_names
    tensor.partial_names = lambda *given: frozenset(name for name in honest(*given) if "norm" not in name)
    return _proof(arguments, channel)


def untied(arguments: dict[str, Any], channel: Any) -> Any:
    """A tied head computes with the embedding's weights, and its gradient never reaches them."""
    honest = vocabulary.project

    def faulty(product: Any, *given: Any, **named: Any) -> Any:
        module = product.__self__
        with _detached_weight(module):
            return honest(product, *given, **named)

    vocabulary.project = faulty
    return _proof(arguments, channel)


@contextmanager
def _detached_weight(module: Any) -> Any:
    weight = module._parameters["weight"]
    module._parameters["weight"] = weight.detach()
    try:
        yield
    finally:
        module._parameters["weight"] = weight


def unsummed_input_gradient(arguments: dict[str, Any], channel: Any) -> Any:
    """Columns keep what their own part gives back to the stream; what is sent in its place is thrown away."""
    copy_in = regions.copy_in

    class _CopyIn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, members: Any) -> torch.Tensor:
            ctx.members = members
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            with torch.enable_grad():
                like = torch.zeros_like(gradient, requires_grad=True)
                copy_in(like, ctx.members).backward(gradient)
            return gradient, None

    regions.copy_in = lambda x, members: _CopyIn.apply(x, members) if x.requires_grad else x
    return _proof(arguments, channel)


def bias_from_every_rank(arguments: dict[str, Any], channel: Any) -> Any:
    """A row's bias is added before the sum over ranks, so once for each of them."""
    honest = regions.RunningRegion.leave
    tensor.row_parallel = lambda module, running, product, *given: honest(
        running, product(*given) + (0 if module.bias is None else module.bias)
    )
    return _proof(arguments, channel)
