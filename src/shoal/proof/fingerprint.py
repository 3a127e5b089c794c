"""The name of a check: a digest of all that its outcome depends on, so that none is repeated and none is borrowed.

First of all what the model and the loss compute: the operations of a traced forward with their shapes and constants,
the values of small buffers and constant tensors, and of the first samples. Then what one forward may not show: the
source of the code and of what it calls (`sources.py`), the values that modules hold, the optimiser, the strategy, the
device and its backend, the versions of torch and of Shoal, whose own code counts by its text.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

import shoal
from shoal.job import Job
from shoal.job.elementwise import probe
from shoal.job.gradient_hooks import hooks_of
from shoal.job.groups import param_groups
from shoal.job.random_optimizer import without_draws
from shoal.layout.recorded import Ref
from shoal.layout.trace import CannotTrace, trace
from shoal.proof.sources import Collected, digest_of_file, digest_of_tensor
from shoal.runtime.compiled import running_eagerly
from shoal.strategy import Strategy

SAMPLES = 8
"""First samples of the data, whose values count: masks and branches follow them."""
OWN_ROOMS = ("layout", "parallel", "proof", "runtime", "job", "comm/compress", "technique")
"""The parts of Shoal that decide how a model is cut, run it and check it."""


def fingerprint(job: Job, model: nn.Module, strategy: Strategy, *, backend: str | None = None) -> str:
    """The digest for a job's model, which may be one without memory, under a strategy."""
    digest = hashlib.sha256()

    def add(what: str, value: Any) -> None:
        digest.update(f"{what}\0{json.dumps(value, sort_keys=True, default=repr)}\0".encode())

    add("strategy", str(strategy))
    add("device", [device_kind(), backend or "default"])
    add("versions", [str(torch.__version__), shoal.__version__, _own_text()])
    add("parameters", [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()])
    add("tied", [name for name, _ in model.named_parameters(remove_duplicate=False)])
    if any(buffer.is_meta for buffer in model.buffers()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            model = job.model()
    add("computes", _operations(job))
    held = Collected()
    for path, module in model.named_modules():
        held.add_object(f"module {path}", module)
    for name, param in model.named_parameters():
        held.add(f"hooks {name}", hooks_of(param))
    held.add("loss", job.loss)
    held.add("options", job.options)
    optimizer = job.optimizer(param_groups(model, job.options))
    held.add("optimizer class", type(optimizer))
    for group in optimizer.param_groups:
        held.add("optimizer group", {key: value for key, value in group.items() if key != "params"})
    add("held", held.found)
    add("optimizer kind", probe(without_draws(job.optimizer), model, job.options).kind)
    samples = job.train.batch(np.arange(min(SAMPLES, len(job.train))))
    add("samples", {name: digest_of_tensor(entry) for name, entry in samples.items()})
    add("inputs", list(job.inputs.items()) if isinstance(job.inputs, dict) else list(job.inputs))
    add("job", [repr(job.layout), repr(job.buffers), job.loss_over, job.clip, job.batch_norm, job.global_batch])
    return digest.hexdigest()


def device_kind() -> str:
    """The kind of device that ranks of this machine compute on."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _operations(job: Job) -> Any:
    """What a forward of two samples computes, loss included; the model's name for itself where it cannot be traced."""
    try:
        with running_eagerly():
            recorded = trace(job)
    except CannotTrace as error:
        return str(error)
    refs: Any = lambda leaf: f"%{leaf.value}" if isinstance(leaf, Ref) else _written(leaf)  # noqa: E731
    values = [
        (v.shape, str(v.dtype), v.source, v.name if v.source in ("parameter", "buffer", "batch") else "")
        for v in recorded.values
    ]
    ops = [(op.name, tree_map(refs, op.args), tree_map(refs, op.kwargs), op.outputs) for op in recorded.ops]
    return [values, ops, recorded.output, recorded.loss, sorted(recorded.constants.items())]


def _written(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else repr(leaf)


@cache
def _own_text() -> str:
    home = Path(shoal.__file__).parent
    files = [
        file
        for room in OWN_ROOMS
        for file in ([home / room] if room.endswith(".py") else sorted((home / room).rglob("*.py")))
    ]
    return hashlib.sha256("".join(digest_of_file(str(file)) for file in files).encode()).hexdigest()
