"""How replicas synchronise buffers that a forward updates from its samples: running statistics, codebooks, counts.

Each replica sees only its part of the batch, so such buffers diverge unless the job declares a mode (`Job.buffers`).
Batch norm modules are excluded: their statistics are synchronised (`Job.batch_norm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.job.errors import JobError

BufferMode = Literal["average", "sum", "broadcast", "local"]
"""Applied after each step. average: the mean of the replicas' changes, equal to the change in one process if the update
is linear in means over the batch. sum: the sum of their changes (counts, sums over samples). broadcast: the first
replica's value. local: each replica keeps its own."""

MODES: tuple[str, ...] = get_args(BufferMode)
EXACT: tuple[str, ...] = ("average", "sum")
"""Modes with which a buffer can equal that of one process."""


def declared(buffers: BufferMode | Mapping[str, BufferMode] | None) -> dict[str, BufferMode]:
    """Pattern -> mode, from the value of `Job.buffers`."""
    if buffers is None:
        return {}
    return {"*": buffers} if isinstance(buffers, str) else dict(buffers)


def wrong_declaration(buffers: object) -> str:
    """Why this cannot be `Job.buffers`; empty if it can."""
    if buffers is not None and not isinstance(buffers, (str, Mapping)):
        return f"buffers is {buffers!r}, but must be one of {MODES} or {{pattern: one of them}}"
    for pattern, mode in declared(buffers).items():  # type: ignore[arg-type]
        if mode not in MODES or not isinstance(pattern, str):
            return f"buffers has {mode!r} for {pattern!r}, but a mode is one of {MODES}"
    return ""


def buffer_modes(buffers: BufferMode | Mapping[str, BufferMode] | None, model: nn.Module) -> dict[str, BufferMode]:
    """Buffer -> mode. The first pattern that matches counts.

    Raises:
        JobError: A pattern matches no buffer, or integers are to be averaged.
    """
    patterns = declared(buffers)
    if not patterns:
        return {}
    normed = tuple(f"{path}." if path else "" for path, m in model.named_modules() if isinstance(m, _BatchNorm))
    known = {name: b for name, b in model.named_buffers() if not any(name.startswith(path) for path in normed)}
    found: dict[str, BufferMode] = {}
    for pattern, mode in patterns.items():
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching and pattern != "*":
            there = ", ".join(sorted(known)) or "none but those of batch norm, which are synchronised"
            raise JobError(f"buffers names {pattern!r}, but no buffer of the model matches; its buffers: {there}")
        for name in matching:
            if name in found:
                continue
            if mode == "average" and not (known[name].is_floating_point() or known[name].is_complex()):
                if pattern == name:
                    raise JobError(
                        f"buffers has 'average' for {name}, which holds {known[name].dtype}: integers have no "
                        "mean; 'sum' adds the replicas' changes, 'broadcast' takes those of the first"
                    )
                continue
            found[name] = mode
    return found
