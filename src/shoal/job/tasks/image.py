"""The task `image`: a VGG or a ResNet, both with batch norm, learns MNIST's digits.
SGD with momentum, where batch size, batch norm and the order of reductions affect the result most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.job.data.mnist import ImageData, mnist
from shoal.job.groups import DecayMatrices
from shoal.job.job import Job, Target
from shoal.job.losses import classifier_metrics, cross_entropy
from shoal.job.models.resnet import ResNet
from shoal.job.models.vgg import VGG
from shoal.job.schedule import WarmupCosine


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """One network at one size of the task."""

    model: Callable[[], nn.Module]
    image: int
    channels: int = 1
    global_batch: int
    steps: int
    learning_rate: float
    evaluate_every: int
    validation_samples: int | None = None
    target_accuracy: float | None = None


VGG16_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))

SETTINGS = {
    ("vgg", "tiny"): ImageSettings(
        model=partial(VGG, stages=((2, 8), (2, 16)), fully_connected=(32,), classes=10, image=14),
        image=14,
        global_batch=24,
        steps=400,
        learning_rate=0.05,
        evaluate_every=100,
        validation_samples=240,
    ),
    ("resnet", "tiny"): ImageSettings(
        model=partial(ResNet, blocks=(1, 1), widths=(8, 16), classes=10),
        image=14,
        global_batch=24,
        steps=400,
        learning_rate=0.2,
        evaluate_every=100,
        validation_samples=240,
    ),
    # These targets are reached after 200 to 300 steps: about 80 s (vgg) and 60 to 70 s (resnet) on one core of 2026.
    ("vgg", "small"): ImageSettings(
        model=partial(VGG, stages=((2, 64), (2, 128), (2, 256)), fully_connected=(256,), classes=10, image=28),
        image=28,
        global_batch=48,
        steps=400,
        learning_rate=0.05,
        evaluate_every=25,
        target_accuracy=0.98,
    ),
    ("resnet", "small"): ImageSettings(
        model=partial(ResNet, blocks=(2, 2, 2), widths=(24, 48, 96), classes=10),
        image=28,
        global_batch=48,
        steps=400,
        learning_rate=0.1,
        evaluate_every=25,
        target_accuracy=0.975,
    ),
    # The paper's own network, without batch norm. 1,000 classes are ImageNet's; the digits use ten of them.
    ("vgg", "vgg16"): ImageSettings(
        model=partial(
            VGG,
            stages=VGG16_STAGES,
            fully_connected=(4096, 4096),
            classes=1000,
            image=224,
            channels=3,
            batch_norm=False,
        ),
        image=224,
        channels=3,
        global_batch=64,
        steps=10_000,
        learning_rate=0.01,
        evaluate_every=500,
    ),
    ("resnet", "resnet50"): ImageSettings(
        model=partial(
            ResNet,
            blocks=(3, 4, 6, 3),
            widths=(64, 128, 256, 512),
            classes=1000,
            channels=3,
            bottleneck=True,
            large_stem=True,
        ),
        image=224,
        channels=3,
        global_batch=256,
        steps=10_000,
        learning_rate=0.1,
        evaluate_every=500,
    ),
}


def image(network: str = "vgg", size: str = "tiny", **changes: Any) -> Job:
    """The job of one network at one size; `changes` replace fields of the Job."""
    settings = SETTINGS[network, size]
    train = ImageData(*mnist("train"), size=settings.image, channels=settings.channels)
    validation = ImageData(
        *mnist("validation"),
        size=settings.image,
        channels=settings.channels,
        num_samples=settings.validation_samples,
    )
    job = Job(
        name=f"image:{network}:{size}",
        model=settings.model,
        train=train,
        validation=validation,
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=settings.learning_rate, momentum=0.9, weight_decay=1e-4),
        options=DecayMatrices(weight_decay=1e-4),
        schedule=WarmupCosine(steps=settings.steps, warmup=settings.steps // 20, floor=0.01),
        clip=1.0,
        global_batch=settings.global_batch,
        steps=settings.steps,
        metrics=classifier_metrics,
        evaluate_every=settings.evaluate_every,
        target=Target(metric="accuracy", value=settings.target_accuracy, better="higher")
        if settings.target_accuracy
        else None,
        batch_norm="sync",
    )
    return replace(job, **changes) if changes else job
