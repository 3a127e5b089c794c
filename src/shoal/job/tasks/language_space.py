"""The search space of the task `language`: a GPT's depth, width and feed-forward layers, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job.data.text import TextData, standard_library
from shoal.job.errors import JobError
from shoal.job.groups import DecayMatrices
from shoal.job.job import Job
from shoal.job.losses import cross_entropy, language_metrics, perplexity
from shoal.job.models.gpt import GPT, MLP, GPTConfig
from shoal.job.schedule import WarmupCosine
from shoal.job.space import Space, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageSpace:
    """One size of the space."""

    layers: tuple[int, int]
    hidden: tuple[int, int, int]
    """Least, most, step."""
    sequence: int
    global_batch: int
    steps: int
    validation_samples: int


SIZES = {
    "tiny": LanguageSpace(
        layers=(1, 3), hidden=(16, 64, 16), sequence=32, global_batch=24, steps=120, validation_samples=96
    ),
    "small": LanguageSpace(
        layers=(2, 6), hidden=(128, 384, 64), sequence=128, global_batch=24, steps=160, validation_samples=96
    ),
}


class GatedMLP(nn.Module):
    """The feed-forward layer with a gate, as wide as has the parameters of the plain one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner = 8 * config.hidden // 3
        self.gate = nn.Linear(config.hidden, inner)
        self.up = nn.Linear(config.hidden, inner)
        self.down = nn.Linear(inner, config.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))


class NarrowMLP(nn.Module):
    """The feed-forward layer, half as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 2 * config.hidden)
        self.down = nn.Linear(2 * config.hidden, config.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_BLD)))


def language_space(size: str = "tiny") -> Space:
    """The space at one size."""
    if size not in SIZES:
        raise JobError(f"the search space of language has the sizes {', '.join(SIZES)}, not {size!r}")
    settings = SIZES[size]

    def space(trial: Trial) -> Job:
        layers = trial.suggest_int("layers", *settings.layers)
        hidden = trial.suggest_int("hidden", settings.hidden[0], settings.hidden[1], step=settings.hidden[2])
        heads = trial.suggest_categorical("heads", (2, 4, 8))
        rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        decay = trial.suggest_float("weight_decay", 1e-3, 1.0, log=True)
        warmup = trial.suggest_float("warmup", 0.0, 0.4)
        second = trial.suggest_float("beta2", 0.9, 0.999)
        config = GPTConfig(layers=layers, heads=heads, hidden=hidden, sequence=settings.sequence)

        def model() -> nn.Module:
            net = GPT(config)
            for number, block in enumerate(net.blocks):
                options = {name: partial(kind, config) for name, kind in FEED_FORWARD.items()}
                block.mlp = trial.module(f"feed_forward{number + 1}", options)
            return net

        return Job(
            name=f"language:space:{size}",
            model=model,
            train=TextData(standard_library("train"), sequence=settings.sequence),
            validation=TextData(
                standard_library("validation"), sequence=settings.sequence, num_samples=settings.validation_samples
            ),
            loss=cross_entropy,
            optimizer=partial(torch.optim.AdamW, lr=rate, betas=(0.9, second), weight_decay=decay),
            options=DecayMatrices(weight_decay=decay),
            schedule=WarmupCosine(steps=settings.steps, warmup=round(warmup * settings.steps), floor=0.1),
            clip=1.0,
            global_batch=settings.global_batch,
            steps=settings.steps,
            metrics=language_metrics,
            derived={"perplexity": perplexity},
        )

    return space


FEED_FORWARD = {"mlp": MLP, "gated": GatedMLP, "narrow": NarrowMLP}
