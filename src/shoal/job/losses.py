"""Losses and metrics as sums with their counts, for the built-in tasks and for user jobs.
A target of -100 is not counted, as in PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def logits_of(output: Any) -> Tensor:
    """The logits, whether the model returns them bare or in an object (as Hugging Face models do)."""
    logits = getattr(output, "logits", output)
    assert isinstance(logits, Tensor), f"expected logits, got a {type(output).__name__}"
    return logits


def cross_entropy(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy between logits [..., classes] and batch["y"] [...], and how many targets
    counted.
    """
    logits, target = logits_of(output), batch["y"]
    total = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def correct(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """How many of the most likely classes are the target, and how many targets counted."""
    target = batch["y"]
    counted = target != IGNORED
    return ((logits_of(output).argmax(dim=-1) == target) & counted).sum(), counted.sum()


def language_metrics(output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {"loss": cross_entropy(output, batch)}


def classifier_metrics(output: Any, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {"loss": cross_entropy(output, batch), "accuracy": correct(output, batch)}


def perplexity(values: dict[str, float]) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return (
        math.exp(values["loss"]) if values["loss"] < 700 else math.inf if values["loss"] == values["loss"] else math.nan
    )
