"""A space whose jobs train in a moment: a line through points."""

import torch
from torch import nn

from shoal.job import Job, TensorData

POINTS = torch.linspace(-1, 1, 64)[:, None]
DATA = TensorData(x=POINTS, y=3 * POINTS + 1)


def squared(output, batch):
    return ((output - batch["y"]) ** 2).sum(), len(output)


def space(trial):
    rate = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.9)
    hidden = trial.suggest_int("hidden", 2, 8)
    between = {"tanh": nn.Tanh, "relu": nn.ReLU}

    def model():
        return nn.Sequential(nn.Linear(1, hidden), trial.module("between", between), nn.Linear(hidden, 1))

    return Job(
        name="line",
        model=model,
        train=DATA,
        validation=DATA,
        loss=squared,
        global_batch=8,
        steps=16,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=rate, momentum=momentum),
    )


def plain(trial):
    rate = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    return Job(
        name="line",
        model=lambda: nn.Linear(1, 1),
        train=DATA,
        validation=DATA,
        loss=squared,
        global_batch=8,
        steps=4,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=rate),
    )


def nothing(trial):
    return Job(
        name="line",
        model=lambda: nn.Linear(1, 1),
        train=DATA,
        loss=squared,
        global_batch=8,
        steps=4,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )
