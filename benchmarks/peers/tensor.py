"""Tensor parallelism by hand: DTensor plans for the GPT, with whole activations between its layers or cut ones, the
vocabulary and the loss cut as well; and the limit, a GPT that has half of every matrix and talks to nobody.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from peers.common import LIMIT, Contestants, Step, batches, clip_by, gradients, optimizer_of, shoal_step, squares
from shoal.job import Job
from shoal.runtime.step import build_model

PEERS = {"tp(2)": "DTensor plan", "tp(2, sequence=True)": "DTensor plan, SequenceParallel"}


def contestants(job: Job, me: Any, plain: Any) -> Contestants:
    mesh = DeviceMesh.from_group(plain, "cpu", mesh_dim_names=("tp",))
    found: Contestants = {LIMIT: partial(limit_step, job, me.world)}
    for text, peer in PEERS.items():
        found[peer] = partial(dtensor_step, job, mesh, sequence="sequence" in text)
        found[text] = partial(shoal_step, job, text, me)
    return found


def plan(layers: int, *, sequence: bool) -> dict[str, Any]:
    """One all-reduce a pair of projections in each direction, or an all-gather and a reduce-scatter."""
    between = Shard(1) if sequence else Replicate()
    into = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    found: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        found["blocks.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        found["norm"] = SequenceParallel(use_local_output=True)
    for number in range(layers):
        at = f"blocks.{number}"
        found[f"{at}.attention"] = found[f"{at}.mlp"] = into
        for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
            found[f"{at}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "mlp.down"):
            found[f"{at}.{name}"] = RowwiseParallel(output_layouts=between)
        if sequence:
            for name in ("attention_norm", "mlp_norm"):
                found[f"{at}.{name}"] = SequenceParallel(use_local_output=True)
    return found


def dtensor_step(job: Job, mesh: DeviceMesh, *, sequence: bool) -> Step:
    model = build_model(job)
    parallelize_module(model, mesh, plan(len(model.blocks), sequence=sequence))
    named = list(model.named_parameters())
    cut = [(name, param) for name, param in named if isinstance(param, DTensor)]
    whole = [(name, param) for name, param in named if not isinstance(param, DTensor)]
    # One optimiser for each kind: they cannot be mixed in one call.
    optimizers = [optimizer_of(job, kind) for kind in (cut, whole)]
    data = batches(job)

    def step() -> float:
        batch = next(data)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            logits = model(batch["x"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum") / batch["y"].numel()
            loss.backward()
        cut_squares = torch.nn.utils.get_total_norm(gradients(p for _, p in cut)).full_tensor().square()
        norm = (cut_squares + squares(p for _, p in whole)).sqrt()
        clip_by((p for _, p in whole), norm, job.clip)
        if job.clip is not None:
            scale = min(1.0, job.clip / (float(norm) + 1e-6))
            for gradient in gradients(p for _, p in cut):
                gradient.mul_(scale)
        for optimizer in optimizers:
            optimizer.step()
        told = loss.detach()
        return float(told.full_tensor() if isinstance(told, DTensor) else told)

    return step


def limit_step(job: Job, ranks: int) -> Step:
    """Half of every matrix, the whole stream, no sums: the numbers mean nothing, the work is that of a rank."""
    model = halved(build_model(job), ranks)
    words = model.head.out_features
    optimizer = optimizer_of(job, model.named_parameters())
    data = batches(job)

    def step() -> None:
        batch = next(data)
        optimizer.zero_grad(set_to_none=True)
        logits, target = model(batch["x"] % words), batch["y"] % words
        (F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / target.numel()).backward()
        clip_by(model.parameters(), squares(model.parameters()).sqrt(), job.clip)
        optimizer.step()

    return step


def halved(model: nn.Module, ranks: int) -> nn.Module:
    def columns(linear: nn.Linear) -> nn.Linear:
        return of(
            linear, linear.weight.chunk(ranks, 0)[0], None if linear.bias is None else linear.bias.chunk(ranks)[0]
        )

    def rows(linear: nn.Linear) -> nn.Linear:
        return of(linear, linear.weight.chunk(ranks, 1)[0], linear.bias)

    def of(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        linear.weight = nn.Parameter(weight.detach().clone())
        linear.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        linear.out_features, linear.in_features = weight.shape
        return linear

    for block in model.blocks:
        for project in (block.attention.query, block.attention.key, block.attention.value, block.mlp.up):
            columns(project)
        for project in (block.attention.out, block.mlp.down):
            rows(project)
    columns(model.head)
    model.tokens = nn.Embedding.from_pretrained(model.tokens.weight.chunk(ranks)[0].detach().clone(), freeze=False)
    return model
