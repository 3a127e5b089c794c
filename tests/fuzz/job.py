"""A Case as a Shoal job: the same model, data and optimiser, with the loss as a sum and a count."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fuzz.cases import Case, case_of
from fuzz.models import build, data_of
from fuzz.optimizers import lr_factor, optimizer_of
from shoal.job import Job, TensorData


def sum_and_count(case: Case, output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    y = batch["y"]
    if case.loss == "mse":
        return F.mse_loss(output, y, reduction="sum"), y.numel()
    if case.loss == "contrastive":
        scores = output @ output.T
        return scores.logsumexp(-1).sum() - scores.diagonal().sum(), len(output)
    flat, target = output.flatten(0, -2), y.flatten()
    total = F.cross_entropy(flat, target, ignore_index=-100, reduction="sum")
    if case.loss == "z":
        total = total + 0.01 * (flat.logsumexp(-1).square() * (target != -100)).sum()
    return total, (target != -100).sum()


def decay(case: Case, name: str, param: Tensor) -> dict[str, Any]:
    return {"weight_decay": 0.1 if param.dim() >= 2 else 0.0} if case.decay_matrices else {}


def job_of(number: int) -> Job:
    case = case_of(number)
    declared: dict[str, Any] = {}
    if case.loss == "contrastive":
        declared["loss_over"] = "batch"
    if case.averages_buffers:
        declared["buffers"] = "average"
    return Job(
        name=f"fuzz-{number}",
        model=partial(build, case),
        train=TensorData(**data_of(case)),
        loss=partial(sum_and_count, case),
        optimizer=partial(optimizer_of, case.optimizer),
        options=partial(decay, case),
        schedule=partial(lr_factor, case.schedule),
        clip=case.clip,
        global_batch=case.batch,
        steps=case.steps,
        last_batch=case.last_batch,
        seed=case.seed,
        **declared,
    )
