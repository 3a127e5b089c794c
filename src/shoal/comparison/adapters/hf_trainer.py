"""Hugging Face Trainer: its own loop, callbacks and all, over a data set that yields the samples of each step.

The Trainer owns the loop, so each step of the protocol is one call of its `training_step`, with its own preparation of
inputs, its own backward through Accelerate, and its own clipping and update as its loop does them.
"""

from __future__ import annotations

import tempfile
from typing import Any

from torch import Tensor, nn

from shoal.comparison.adapter import Adapter, RankPlace, Replica, Trainee, optimizer_of
from shoal.job import Batch, Job, share
from shoal.runtime.step import build_model


class InTrainer(Replica):
    trainer: Any

    def step(self, counter: int, lr_factor: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * lr_factor
        indices = self.order.indices(counter)
        batch = self.job.train.batch(share(indices, rank=self.place.rank, ranks=self.place.world))
        self.trainer.training_step(self.forward, batch)
        if self.job.clip is not None:
            self.trainer.accelerator.clip_grad_norm_(self.forward.parameters(), self.job.clip)
        self.update()
        self.zero()


class HeldModel(nn.Module):
    """The job's model without its attributes: the Trainer takes a `config` for one of its own library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class HFTrainer(Adapter):
    title = "Hugging Face Trainer (DDP)"
    packages = ("transformers", "accelerate")
    same_as = "dp({n})"

    def build(self, job: Job, place: RankPlace) -> Trainee:
        from transformers import Trainer, TrainingArguments

        model = build_model(job)
        made: list[InTrainer] = []

        class JobTrainer(Trainer):  # type: ignore[misc]
            def compute_loss(self, model: nn.Module, inputs: Batch, *_: Any, **__: Any) -> Tensor:
                total, count = job.loss_of(job.run_model(model, inputs), inputs)
                return total / made[0].mean_count(count, inputs)

        folder = tempfile.mkdtemp(prefix="shoal-trainer-")
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            max_grad_norm=job.clip or 0.0,
            ddp_broadcast_buffers=False,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            remove_unused_columns=False,
        )
        optimizer = optimizer_of(job, model.named_parameters())
        held = HeldModel(model)
        trainer = JobTrainer(model=held, args=arguments, optimizers=(optimizer, None))
        forward, prepared = trainer.accelerator.prepare(held, optimizer)
        trainer.model_wrapped = forward
        trainer.current_gradient_accumulation_steps = 1
        trainee = InTrainer(job, place, model, forward, prepared)
        trainee.trainer = trainer
        made.append(trainee)
        return trainee


ADAPTER = HFTrainer
