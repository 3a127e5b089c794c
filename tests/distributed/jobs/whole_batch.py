"""Jobs whose optimiser sees the whole batch several times in a step."""

from __future__ import annotations

from functools import partial

import torch

from distributed.jobs.offloaded import job_of
from shoal.job import ShardedLBFGS

OPTIONS = {"lr": 0.3, "max_iter": 5, "history_size": 3}
JOB = job_of(width=12, depth=2, batch=48, optimizer=partial(ShardedLBFGS, **OPTIONS), clip=None)
plain = job_of(width=12, depth=2, batch=48, optimizer=partial(torch.optim.LBFGS, **OPTIONS), clip=None)
