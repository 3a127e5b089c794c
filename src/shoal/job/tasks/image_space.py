"""The search space of the task `image`: a convolutional network's layers and width, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from shoal.job.data.mnist import ImageData, mnist
from shoal.job.errors import JobError
from shoal.job.groups import DecayMatrices
from shoal.job.job import Job
from shoal.job.losses import classifier_metrics, cross_entropy
from shoal.job.models.searched import LAYERS, SearchedNet
from shoal.job.schedule import WarmupCosine
from shoal.job.space import Space, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpace:
    """One size of the space."""

    image: int
    widths: tuple[int, int, int]
    """Channels of the first stage: least, most, step."""
    layers: int
    """In each of two stages."""
    global_batch: int
    steps: int
    validation_samples: int


SIZES = {
    "tiny": ImageSpace(image=14, widths=(4, 16, 4), layers=2, global_batch=24, steps=120, validation_samples=480),
    "small": ImageSpace(image=28, widths=(16, 64, 16), layers=3, global_batch=48, steps=400, validation_samples=1000),
}


def image_space(size: str = "tiny") -> Space:
    """The space at one size."""
    if size not in SIZES:
        raise JobError(f"the search space of image has the sizes {', '.join(SIZES)}, not {size!r}")
    settings = SIZES[size]

    def space(trial: Trial) -> Job:
        width = trial.suggest_int("width", settings.widths[0], settings.widths[1], step=settings.widths[2])
        rate = trial.suggest_float("lr", 1e-3, 2.0, log=True)
        momentum = trial.suggest_float("momentum", 0.0, 0.98)
        decay = trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True)
        warmup = trial.suggest_float("warmup", 0.0, 0.4)
        clip = trial.suggest_float("clip", 0.03, 30.0, log=True)

        def model() -> torch.nn.Module:
            stages = []
            for stage in range(2):
                channels = width << stage
                options = {name: partial(build, channels) for name, build in LAYERS.items()}
                numbers = range(stage * settings.layers, (stage + 1) * settings.layers)
                stages.append((channels, [partial(trial.module, f"layer{number + 1}", options) for number in numbers]))
            return SearchedNet(stages=stages, classes=10)

        return Job(
            name=f"image:space:{size}",
            model=model,
            train=ImageData(*mnist("train"), size=settings.image),
            validation=ImageData(*mnist("validation"), size=settings.image, num_samples=settings.validation_samples),
            loss=cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=rate, momentum=momentum, weight_decay=decay),
            options=DecayMatrices(weight_decay=decay),
            schedule=WarmupCosine(steps=settings.steps, warmup=round(warmup * settings.steps), floor=0.01),
            clip=clip,
            global_batch=settings.global_batch,
            steps=settings.steps,
            metrics=classifier_metrics,
        )

    return space
