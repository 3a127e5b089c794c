"""A job whose loss of a step tells which samples it had, and whose data can be slow: whole numbers add up exactly."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shoal.job import Job

SAMPLES, BATCH, SEED = 40, 12, 7
VALUES = np.random.default_rng(0).integers(0, 1 << 18, SAMPLES)
RANK = os.getpid()


class Slow:
    """Takes as long as the environment says. A loader process leaves its number in a folder."""

    def __len__(self):
        return SAMPLES

    def batch(self, indices):
        time.sleep(float(os.environ.get("SLOW_JOB_S", "0")))
        folder = os.environ.get("SLOW_JOB_LOG")
        if folder and os.getpid() != RANK:
            Path(folder, f"loader-{os.getpid()}").touch()
        return {"x": torch.as_tensor(VALUES[np.asarray(indices, dtype=np.int64)], dtype=torch.float32)[:, None]}


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + 0.0 * self.weight


job = Job(
    name="slow",
    model=Nothing,
    train=Slow(),
    loss=lambda output, batch: (output.sum(), len(output)),
    seed=SEED,
    optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    global_batch=BATCH,
    steps=10,
)
