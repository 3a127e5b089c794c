"""Context parallelism by hand: each rank has a part of every sequence, and attention sees to the rest. PyTorch's own
context parallelism has no CPU kernel (2.13), so the peers are the two short ways to write it: keys and values gathered
from all ranks (as Llama 3 was trained), and Ulysses' all-to-all of heads, both with DDP for the gradients.

The limit is the same tokens on each rank as whole sequences: the same work, and nothing to send.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd, all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

from peers.common import LIMIT, Contestants, Step, batches, clip_by, optimizer_of, shoal_step, squares, sum_over
from shoal.job import Job
from shoal.job.models.gpt import GPT, CausalSelfAttention
from shoal.runtime.step import build_model

PEERS = {"cp(2, 'ring')": "gathered keys and values, DDP", "cp(2, 'ulysses')": "all-to-all of heads, DDP"}


def contestants(job: Job, me: Any, plain: Any) -> Contestants:
    length = job.model().config.sequence
    half = length // (2 * me.world)
    ends = torch.arange(length).view(-1, half)
    # An early and a late chunk for each rank, so that causal work is even, as in the ring.
    paired = [torch.cat([ends[rank], ends[-1 - rank]]) for rank in range(me.world)]
    in_a_row = list(torch.arange(length).chunk(me.world))
    gathered, dealt = PEERS.values()
    ring, ulysses = PEERS
    return {
        LIMIT: partial(limit_step, job, me),
        gathered: partial(cut_step, job, paired, partial(gathering, paired, me.rank, plain), me, plain),
        ring: partial(shoal_step, job, ring, me),
        dealt: partial(cut_step, job, in_a_row, partial(dealing, me.world, plain), me, plain),
        ulysses: partial(shoal_step, job, ulysses, me),
    }


def gathering(places: list[Tensor], rank: int, plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Own queries with everybody's keys and values: one all-gather, whose gradient is a reduce-scatter."""
    both = all_gather_single_autograd(torch.stack([k, v]).movedim(3, 0).contiguous(), gather_dim=0, group=plain)
    k, v = both.movedim(0, 3).unbind(0)
    seen = places[rank][:, None] >= torch.cat(places)[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def dealing(ranks: int, plain: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whole sequences of some heads in place of parts of all of them, and back."""
    both = torch.stack([q, k, v])  # 3, B, H, L, D
    apart = both.unflatten(2, (ranks, -1)).movedim(2, 0)
    met = all_to_all_single_autograd(apart.flatten(0, 1).contiguous(), None, None, plain).view(apart.shape)
    q, k, v = met.movedim(0, 3).flatten(3, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # B, H/n, nL, D
    back = mixed.unflatten(2, (ranks, -1)).movedim(2, 0)
    home = all_to_all_single_autograd(back.flatten(0, 1).contiguous(), None, None, plain).view(back.shape)
    return home.movedim(0, 1).flatten(1, 2)


class CutAttention(nn.Module):
    def __init__(self, whole: CausalSelfAttention, attend: Any) -> None:
        super().__init__()
        self.whole, self.attend = whole, attend

    def forward(self, x: Tensor) -> Tensor:
        own = self.whole
        q, k, v = (p(x).unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for p in (own.query, own.key, own.value))
        return own.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class CutGPT(nn.Module):
    """The GPT on some positions of each sequence."""

    def __init__(self, model: GPT, attend: Any) -> None:
        super().__init__()
        self.model = model
        for block in model.blocks:
            block.attention = CutAttention(block.attention, attend)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.model.tokens(tokens) + self.model.positions(positions)
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x))


def cut_step(job: Job, places: list[Tensor], attend: Any, me: Any, plain: Any) -> Step:
    model = DistributedDataParallel(CutGPT(build_model(job), attend), process_group=plain)
    optimizer = optimizer_of(job, model.named_parameters())
    mine = places[me.rank]
    data = batches(job)

    def step() -> float:
        batch = next(data)
        optimizer.zero_grad(set_to_none=True)
        logits, y = model(batch["x"][:, mine], mine), batch["y"][:, mine]
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        (total / batch["y"].numel() * me.world).backward()  # DDP takes the mean over ranks.
        clip_by(model.parameters(), squares(model.parameters()).sqrt(), job.clip)
        optimizer.step()
        return float(sum_over(total.detach(), plain)) / batch["y"].numel()

    return step


def limit_step(job: Job, me: Any) -> Step:
    model = build_model(job)
    optimizer = optimizer_of(job, model.named_parameters())
    data = batches(job)

    def step() -> None:
        batch = {name: entry.chunk(me.world)[me.rank] for name, entry in next(data).items()}
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch["x"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum")
        (total / batch["y"].numel()).backward()
        clip_by(model.parameters(), squares(model.parameters()).sqrt(), job.clip)
        optimizer.step()

    return step
