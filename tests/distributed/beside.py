"""A cut model beside the same model uncut, on real ranks: what the tests of tensor parallelism have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.choice import on_one_host
from shoal.comm.ledger import BOOK, Ledger, ledger_of
from shoal.comm.mesh import Members, Mesh
from shoal.estimate.tensor_traffic import crossing_calls
from shoal.estimate.traffic import Group
from shoal.launch.join import join
from shoal.layout.tensor.tokens import stream_blocks
from shoal.parallel.tensor.cut import Applied, cut_tensors, split_stream
from shoal.parallel.tensor.vocabulary import cut_vocabulary


def everyone() -> Members:
    me = join()
    return Mesh([("tp", me.world)], rank=me.rank, backend=me.backend).along("tp")


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.numel():
        return 0.0
    largest = float((ours.detach() - theirs.detach()).abs().max()) / max(float(theirs.detach().abs().max()), 1e-30)
    return largest if largest == largest else float("inf")


def gradients_apart(ours: nn.Module, theirs: nn.Module, applied: Applied, members: Members) -> dict[str, float]:
    """For each parameter: how far this rank's gradient lies from (its part of) the uncut model's."""
    uncut = dict(theirs.named_parameters())
    found = {}
    for name, param in ours.named_parameters():
        expected, got = uncut[name].grad, param.grad
        if expected is None or got is None:
            found[name] = 0.0 if expected is None and got is None else float("inf")
            continue
        expected, got = expected.to_dense(), got.to_dense()
        if name in applied.partial:
            got = got.clone()
            dist.all_reduce(got, group=members.group)
        if name in applied.cuts:
            expected = applied.cuts[name].part(expected, members.size, members.index)
        found[name] = apart(got, expected)
    return found


def predicted(applied: Applied, members: Members) -> Ledger:
    return ledger_of(crossing_calls(Group(axis="tp", ranks=members.size), applied.tally.take()), on_one_host)


def step(model: nn.Module, call: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
    """Forward and backward as a trainer does them; the same weights of the output on every rank."""
    with BOOK.during("forward"):
        output = call(model)
    slope = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(7))
    with BOOK.during("backward"):
        (output * slope).sum().backward()
    return output


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    theirs = make().double()
    return copy.deepcopy(theirs), theirs


def laid_over(model: nn.Module, plan: Any, members: Members, between: Any) -> Applied:
    """Regions, vocabulary and the stream's ends, as one."""
    applied = cut_tensors(model, plan, members, between=between)
    if between == "sequence":
        chain = stream_blocks(model, plan)
        split_stream(model, chain[0], chain[-1], plan.sequence_dim, members, applied.tally)
    words = cut_vocabulary(model, plan.vocabulary, members, tally=applied.tally)
    return replace(applied, cuts={**applied.cuts, **words.cuts})
