"""How fast a run is: tokens per second, and model FLOP/s as a fraction of what the devices could do (MFU).

The numerator is the work of the model's own forward and backward, without recomputation (Chowdhery et al. 2022, PaLM,
appendix B); the denominator the peak of the devices in the strategy's precision, times the number of ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from shoal.cluster import BadCluster
from shoal.strategy import Strategy, amp


@dataclass(frozen=True)
class TrainingSpeed:
    """What turns samples per second into MFU. Rank 0 knows it."""

    flops_per_sample: float | None
    peak_flops: float | None
    """Of all ranks together."""
    peak_of: str
    """What the peak is, in words."""

    def row(self, *, samples: int, count: float, seconds: float) -> dict[str, Any]:
        """Columns of a step: tokens per second where the loss counts tokens, MFU where work and peak are known."""
        found: dict[str, Any] = {}
        if count > samples:
            found["tokens_per_s"] = count / seconds
        if self.flops_per_sample is not None:
            found["model_flops_per_s"] = self.flops_per_sample * samples / seconds
            if self.peak_flops is not None:
                found["mfu"] = found["model_flops_per_s"] / self.peak_flops
        return found

    def summary(self) -> dict[str, Any]:
        """For the record of a run."""
        if self.flops_per_sample is None:
            return {}
        known = {"flops_per_sample": self.flops_per_sample}
        return known if self.peak_flops is None else {**known, "peak_flops": self.peak_flops, "peak_of": self.peak_of}


def speed_of(flops_per_sample: float | None, strategy: Strategy, device: torch.device) -> TrainingSpeed:
    """For a run on ranks that each have such a device."""
    peak, of = _peak(strategy, device) if flops_per_sample is not None else (None, "")
    ranks = strategy.workers
    words = "" if peak is None else f"{peak / 1e12:.4g} TFLOP/s x {ranks} ranks: {of}"
    return TrainingSpeed(flops_per_sample, None if peak is None else peak * ranks, words)


def _peak(strategy: Strategy, device: torch.device) -> tuple[float | None, str]:
    term = strategy.term(amp)
    precision = "fp32" if term is None else term.dtype
    try:
        if device.type == "cpu":
            from shoal.cluster.presets import cluster_here

            return cluster_here().device.peak("fp32"), "a rank's float32 products, measured by shoal calibrate"
        from shoal.cluster.devices import device as named

        name = torch.get_device_module(device).get_device_name(device)
        found = named(re.sub(r"[-_]", " ", name))
        if precision == "fp32" and torch.backends.cuda.matmul.allow_tf32 and "tf32" in found.peak_flops:
            precision = "tf32"
        return found.peak(precision), f"{found.name}, {precision}, datasheet"
    except (BadCluster, ValueError, AttributeError):
        return None, ""
