"""The oracle: what a person would have trained in one plain PyTorch process. It imports nothing of Shoal.

The order of the data follows docs/jobs.md: epoch e visits the samples in the order of
`Generator(PCG64(SeedSequence([seed, e]))).permutation(n)`, and a global batch is the next `batch` of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from fuzz.cases import Case
from fuzz.models import build, data_of
from fuzz.optimizers import lr_factor, optimizer_of


@dataclass
class Trained:
    losses: list[float]
    tensors: dict[str, Tensor]
    """Parameters and buffers, by name."""


def train(case: Case, *, micro_batches: int = 1, jitter: float = 0.0) -> Trained:
    """`micro_batches`: only where batch norm makes the micro-batch part of the model. `jitter`: relative noise on the
    start, to learn how far rounding carries."""
    torch.manual_seed(case.seed)
    model = build(case).train()
    if jitter:
        with torch.no_grad():
            noise = torch.Generator().manual_seed(1)
            for param in model.parameters():
                param.mul_(1 + jitter * torch.randn(param.shape, generator=noise, dtype=param.dtype))
    optimizer = optimizer_of(case.optimizer, groups_of(case, model))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    data = data_of(case)
    losses, at = [], 0
    for step in range(case.steps):
        indices, at = next_batch(case, at)
        batch = {name: entry[indices] for name, entry in data.items()}
        optimizer.zero_grad()
        if micro_batches == 1:
            loss = mean_loss(case, model(batch["x"]), batch["y"])
            loss.backward()
        else:
            loss = torch.zeros((), dtype=torch.float64)
            counted = float(count_of(case, batch["y"]))
            for piece in np.array_split(np.arange(len(indices)), micro_batches):
                if len(piece):
                    part = {name: entry[piece] for name, entry in batch.items()}
                    share = float(count_of(case, part["y"])) / counted
                    own = mean_loss(case, model(part["x"]), part["y"]) * share
                    own.backward()
                    loss = loss + own.detach()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            now = lr * lr_factor(case.schedule, step)
            group["lr"] = torch.tensor(now, dtype=torch.float64) if isinstance(group["lr"], Tensor) else now
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})


def groups_of(case: Case, model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay and vectors do not, where the case says so."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if not case.decay_matrices:
        return [{"params": trained}]
    matrices = [param for param in trained if param.dim() >= 2]
    vectors = [param for param in trained if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def next_batch(case: Case, at: int) -> tuple[np.ndarray, int]:
    """The samples of the global batch that starts at position `at` of all epochs laid end to end; where it ends."""
    n = case.samples
    end = at + case.batch
    if case.last_batch == "short":
        end = min(end, (at // n + 1) * n)
    orders = {
        epoch: np.random.Generator(np.random.PCG64(np.random.SeedSequence([case.seed, epoch]))).permutation(n)
        for epoch in range(at // n, (end - 1) // n + 1)
    }
    return np.array([orders[place // n][place % n] for place in range(at, end)]), end


def mean_loss(case: Case, output: Tensor, y: Tensor) -> Tensor:
    """The loss as a plain script has it: a mean."""
    if case.loss == "mse":
        return F.mse_loss(output, y)
    if case.loss == "contrastive":
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))
    flat, target = output.flatten(0, -2), y.flatten()
    loss = F.cross_entropy(flat, target, ignore_index=-100)
    if case.loss == "z":
        counted = target != -100
        loss = loss + 0.01 * flat[counted].logsumexp(-1).square().mean()
    return loss


def count_of(case: Case, y: Tensor) -> int:
    return y.numel() if case.loss == "mse" else int((y != -100).sum())


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """The newest checkpoint of a run, tensor by tensor, as docs/training.md describes its files."""
    path = max(folder.glob("checkpoints/step-*[0-9]"))
    manifest = json.loads((path / "checkpoint.json").read_text())
    files = {name: safe_open(path / name, framework="pt") for name in manifest["files"]}
    found: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for name, row in manifest["parameters"].items():
        found[name] = torch.full(row["shape"], float("nan"), dtype=getattr(torch, row["dtype"]))
    parts: dict[tuple[str, str], tuple[dict, list[tuple[int, Tensor]]]] = {}
    for row in manifest["pieces"]:
        if row["state"] is None:
            values = files[row["file"]].get_tensor(row["tensor"]).reshape(-1)
            key = (row["parameter"], json.dumps(row.get("part")))
            parts.setdefault(key, (row.get("part"), []))[1].append((row["start"], values))
    for (name, _), (part, rows) in parts.items():
        flat = torch.cat([values for _, values in sorted(rows, key=lambda row: row[0])])
        filled[name] = filled.get(name, 0) + flat.numel()
        if part is None:
            found[name].reshape(-1)[: flat.numel()] = flat
        else:
            put_part(found[name], part, flat)
    for name, row in manifest["buffers"].items():
        values = files[row["file"]].get_tensor(row["tensor"])
        if "part" in row:
            name = row["buffer"]
            if name not in found:
                found[name] = torch.zeros(row["shape"], dtype=getattr(torch, row["dtype"]))
            put_part(found[name], row["part"], values.reshape(-1))
        else:
            found[name] = values.reshape(row["shape"])
    missing = [name for name, count in filled.items() if count != found[name].numel()]
    assert not missing, f"elements missing from the checkpoint: {missing}"
    return found


def put_part(full: Tensor, part: dict, flat: Tensor) -> None:
    """Writes what one rank holds of a tensor that is cut along a dimension, segment by segment."""
    dim, start, places = part["cut"]["dim"], 0, []
    for segment in part["cut"]["segments"]:
        size, larger = divmod(segment, part["ranks"])
        low = start + part["index"] * size + min(part["index"], larger)
        places += range(low, low + size + (part["index"] < larger))
        start += segment
    shape = list(full.shape)
    shape[dim] = len(places)
    full.index_copy_(dim, torch.tensor(places), flat.reshape(shape))


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a tensor relative to its largest element, and the tensor."""
    rows = []
    for name, value in expected.items():
        if name not in found:
            if any(value.data_ptr() == other.data_ptr() for key, other in expected.items() if key in found):
                continue
            tied = any(
                value.shape == other.shape and torch.equal(value, other)
                for key, other in expected.items()
                if key in found
            )
            if not tied:
                rows.append((float("inf"), f"{name} (missing)"))
            continue
        if value.numel():
            apart = (found[name].double() - value.double()).abs().max()
            rows.append((float(apart / value.double().abs().max().clamp(min=1e-3)), name))
    return max(rows, key=lambda row: (row[0] != row[0], row[0]))
