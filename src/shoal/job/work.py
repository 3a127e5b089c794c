"""How much a job computes: the floating-point operations of one sample, counted on the meta device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from shoal.job.facts import build_without_memory
from shoal.job.job import Job

SAMPLES = 2
"""Counted together: batch norm cannot do with one."""
TRAINING = 3
"""A step computes the forward's products three times: once forward, twice backward (with respect to inputs and
weights). What recomputation repeats is not counted, as is usual for MFU."""
OWN = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop}


class _CountedProducts(TorchDispatchMode):
    """Adds up matrix products, convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket) or OWN.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=found))
        return found


def flops_per_sample(job: Job) -> float | None:
    """Floating-point operations of one sample in a training step; None where the model does not run without values."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _CountedProducts() as counted:
            model = build_without_memory(job)
            if not all(param.is_meta for param in model.parameters()):
                return None
            model.to("meta")
            counted.flops = 0
            batch = {name: value.to("meta") for name, value in job.train.batch(np.arange(SAMPLES)).items()}
            job.run_model(model, batch)
    except Exception:  # A model that reads values; its work is not known then, and nothing depends on it.
        return None
    return TRAINING * counted.flops / SAMPLES or None
