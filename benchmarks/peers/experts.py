"""Experts by hand: tokens sorted by expert, sent to its rank and back by `all_to_all_single`, with DDP for all that is
not an expert; and the limit, half the experts on each rank, every token sent to one that is there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

from peers.common import LIMIT, Contestants, Step, batches, clip_by, optimizer_of, shoal_step, squares, sum_over
from shoal.job import Job, share
from shoal.job.models.gpt import GPT, MLP, GPTConfig
from shoal.runtime.step import build_model

PEERS = {"ep(2)": "all_to_all_single, DDP"}
EXPERTS, CHOICES = 8, 2


class Mixture(nn.Module):
    """Each token to its best two of eight experts, written as for one machine."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden, EXPERTS, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, choices = self.router(tokens).softmax(-1).topk(CHOICES)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(choices == number)
            if len(token):
                mixed = mixed.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        return mixed.view_as(x)


class MixtureGPT(GPT):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.mlp = Mixture(config)


def mixture_job(job: Job) -> Job:
    return replace(job, model=partial(MixtureGPT, job.model().config))


def contestants(job: Job, me: Any, plain: Any) -> Contestants:
    (text, peer), *_ = PEERS.items()
    return {
        LIMIT: partial(limit_step, job, me),
        peer: partial(exchange_step, job, me, plain),
        text: partial(shoal_step, job, text, me),
    }


class Exchanged(nn.Module):
    """The mixture with this rank's experts; the others' are asked by message."""

    def __init__(self, whole: Mixture, me: Any, plain: Any) -> None:
        super().__init__()
        held = EXPERTS // me.world
        self.router, self.plain, self.ranks = whole.router, plain, me.world
        self.experts = whole.experts[me.rank * held : (me.rank + 1) * held]

    def forward(self, x: Tensor) -> Tensor:
        tokens, held = x.flatten(0, -2), len(self.experts)
        weights, choices = self.router(tokens).softmax(-1).topk(CHOICES)
        order = choices.flatten().argsort(stable=True)
        leaving = torch.bincount(choices.flatten(), minlength=EXPERTS)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.plain)
        out_rows = leaving.view(self.ranks, held).sum(1).tolist()
        in_rows = arriving.view(self.ranks, held).sum(1).tolist()
        rows = all_to_all_single_autograd(tokens[order // CHOICES], in_rows, out_rows, self.plain)
        # By rank, then by expert: dealt to the experts, and back into the order in which they came.
        numbers = torch.arange(held).repeat(self.ranks).repeat_interleave(arriving)
        by_expert = numbers.argsort(stable=True)
        parts = rows[by_expert].split(torch.bincount(numbers, minlength=held).tolist())
        # An expert without tokens is not asked: it has no gradient then, and is not decayed, as on one machine.
        pairs = zip(self.experts, parts, strict=True)
        answers = torch.cat([expert(part) if len(part) else part for expert, part in pairs])
        answers = torch.zeros_like(answers).index_copy(0, by_expert, answers)
        home = all_to_all_single_autograd(answers, out_rows, in_rows, self.plain)
        weighted = home * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOICES, weighted).view_as(x)


def exchange_step(job: Job, me: Any, plain: Any) -> Step:
    model = build_model(job)
    for block in model.blocks:
        block.mlp = Exchanged(block.mlp, me, plain)
    experts = [param for name, param in model.named_parameters() if ".experts." in name]
    dense = [param for name, param in model.named_parameters() if ".experts." not in name]
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    replica = DistributedDataParallel(model, process_group=plain)
    optimizer = optimizer_of(job, model.named_parameters())

    def after(loss: Tensor) -> None:
        loss.backward()
        for param in experts:  # DDP took the mean over ranks of the others; these are sums of all tokens already.
            if param.grad is not None:
                param.grad.div_(me.world)
        norm = (squares(dense) + sum_over(squares(experts), plain)).sqrt()
        clip_by(model.parameters(), norm, job.clip)

    return _shared_step(job, replica, optimizer, after, me, plain)


def limit_step(job: Job, me: Any) -> Step:
    model = build_model(job)
    for block in model.blocks:
        block.mlp = Here(block.mlp, me.world)
    optimizer = optimizer_of(job, model.named_parameters())

    def after(loss: Tensor) -> None:
        loss.backward()
        clip_by(model.parameters(), squares(model.parameters()).sqrt(), job.clip)

    return _shared_step(job, model, optimizer, after, me, None)


class Here(nn.Module):
    """Half the experts, and every token to one of them, as many as before."""

    def __init__(self, whole: Mixture, ranks: int) -> None:
        super().__init__()
        self.router, self.experts = whole.router, whole.experts[: EXPERTS // ranks]

    def forward(self, x: Tensor) -> Tensor:
        tokens, held = x.flatten(0, -2), len(self.experts)
        weights, choices = self.router(tokens).softmax(-1).topk(CHOICES)
        numbers = choices.flatten() % held
        order = numbers.argsort(stable=True)
        parts = tokens[order // CHOICES].split(torch.bincount(numbers, minlength=held).tolist())
        answers = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        weighted = answers * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOICES, weighted).view_as(x)


def _shared_step(job: Job, model: nn.Module, optimizer: Any, after: Any, me: Any, plain: Any) -> Step:
    data = batches(job)

    def step() -> float | None:
        whole = next(data)
        mine = share(torch.arange(job.global_batch).numpy(), rank=me.rank, ranks=me.world)
        batch, tokens = {name: entry[mine] for name, entry in whole.items()}, whole["y"].numel()
        optimizer.zero_grad(set_to_none=True)
        total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")
        after(total / tokens * me.world)
        optimizer.step()
        return None if plain is None else float(sum_over(total.detach(), plain)) / tokens

    return step
