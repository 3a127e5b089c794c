"""Jobs whose samples depend on each other, or whose loss is no sum; each once with its declaration and once without.

A global batch of 12 divides among 2, 3 and 4 ranks. `coupled.py:name` is a job.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy

WIDTH = 6


def _data(num: int = 60) -> TensorData:
    generator = torch.Generator().manual_seed(3)
    x, z = (torch.randn(num, WIDTH, generator=generator) for _ in range(2))
    return TensorData(x=x, z=z, y=torch.randint(0, WIDTH, (num,), generator=generator))


def make(model: Callable[[], nn.Module], **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "coupled",
        "model": model,
        "train": _data(),
        "loss": cross_entropy,
        "clip": 0.5,
        "global_batch": 12,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "steps": 4,
    }
    return Job(**(settings | changes))


class Plain(nn.Module):
    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2) if dropout else nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.mix(block(x))
        return x

    def mix(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.dropout(self.features(x)))


class Centred(Plain):
    def mix(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class HandNorm(Plain):
    def mix(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


class Gated(Plain):
    """Mixes samples behind a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(0)


class Balanced(Plain):
    """A load-balancing loss, computed in the model over the batch it sees."""

    def forward(self, x: Tensor) -> Any:
        share = self.features(x).softmax(-1).mean(0)
        return super().forward(x), WIDTH * (share * share).sum()


def balanced_loss(output: Any, batch: dict[str, Tensor]) -> Any:
    total, count = cross_entropy(output[0], batch)
    return total + 0.01 * count * output[1], count


class TwoTowers(nn.Module):
    """CLIP: two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Plain(), Plain()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, z: Tensor) -> Any:
        return {"left": self.left(x), "right": self.right(z), "scale": self.temperature.exp()}


def clip_loss(output: Any, batch: dict[str, Tensor]) -> Any:
    logits = output["scale"] * F.normalize(output["left"], dim=-1) @ F.normalize(output["right"], dim=-1).T
    labels = torch.arange(len(logits))
    pairs = F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(logits.T, labels, reduction="sum")
    return pairs / 2, len(logits)


def info_nce_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    z = F.normalize(output, dim=-1)
    other = F.normalize(batch["z"], dim=-1)
    return F.cross_entropy(z @ other.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)


def mean_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return F.cross_entropy(output, batch["y"]), 1


def wrong_count_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return F.cross_entropy(output, batch["y"], reduction="sum"), 1


def weighted_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    weight = output.sigmoid().mean(-1)
    return (F.cross_entropy(output, batch["y"], reduction="none") * weight).sum(), weight.sum()


def weighted_mean(output: Tensor, batch: dict[str, Tensor]) -> Any:
    total, count = weighted_loss(output, batch)
    return total / count, 1


class Padded:
    """Samples of different lengths, padded to the longest of those read together."""

    def __len__(self) -> int:
        return 60

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        lengths = [2 + int(index) % 5 for index in indices]
        x = torch.zeros(len(indices), max(lengths, default=2), WIDTH)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            x[row, :length] = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(int(index)))
        return {"x": x, "y": torch.tensor([int(index) % WIDTH for index in indices])}


class MeanOfPadded(Plain):
    """Divides by the padded length."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.features(x).mean(1))


class Noisy(Plain):
    def mix(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Complex(nn.Module):
    """Real data through complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH**0.5)
        self.register_buffer("phase", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH).float()))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        turned = (x.to(self.mix.dtype) @ self.mix) * self.phase
        return self.head(turned.real * turned.imag)


class Turned(nn.Module):
    """A layer with complex weights between real activations."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        turned = x.to(self.mix.dtype) @ self.mix
        return x + self.scale * (turned.real * turned.imag).tanh()


class FromNumpy(Plain):
    """A buffer that is rounded to float32 when the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(np.linspace(0.1, 1.3, WIDTH)).float())

    def mix(self, x: Tensor) -> Tensor:
        return x * self.table


def _numpy_data() -> TensorData:
    generator = np.random.default_rng(3)
    return TensorData(
        x=torch.from_numpy(generator.normal(size=(60, WIDTH))).float(),
        y=torch.from_numpy(generator.integers(0, WIDTH, 60)),
    )


class FromNumpyData:
    """Samples that are rounded to float32 when they are read."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(3).normal(size=(60, WIDTH))

    def __len__(self) -> int:
        return 60

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {"x": torch.from_numpy(self.x[indices]).float(), "y": torch.from_numpy(indices % WIDTH)}


class Functional(Plain):
    """Dropout by the library's function, with no module that says so."""

    def mix(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class Counting(Plain):
    """A buffer that every forward changes, and that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        self.level.mul_(1.01)
        return super().forward(x * self.level)


class Chaotic(Plain):
    """The logistic map, so many times over: each nearly doubles what it is off by, and training much more."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x).sigmoid()
        for _ in range(self.times):
            x = 3.9 * x * (1 - x)
        return x


class Masked(Plain):
    """A causal mask of infinities, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((WIDTH, WIDTH), float("-inf")).triu(1))

    def mix(self, x: Tensor) -> Tensor:
        return x * (x[:, :, None] * x[:, None] + self.mask).softmax(-1).sum(1)


class MeanSeen(Plain):
    """A buffer that follows the samples that a forward sees, and that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x)


def one_element_loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return F.cross_entropy(output, batch["y"], reduction="sum").reshape(1), np.float64(len(output))


def nothing_counts(output: Tensor, batch: dict[str, Tensor]) -> Any:
    return 0.0 * output.sum(), 0


CLIP: dict[str, Any] = {"loss": clip_loss, "inputs": ("x", "z")}


class SparseRows(nn.Module):
    """Gradients of an embedding as sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows((x.abs() * 3).long().clamp(max=8)).mean(1))


def rare_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the first samples of the order none counts, of a batch some do."""
    counted = batch["x"][:, 0] > 0.5
    each = F.cross_entropy(output, batch["y"], reduction="none")
    return (each * counted).sum(), counted.sum()


class ByRows(torch.optim.Optimizer):
    """Keeps a number for each row, of a shape that is a bias's own number of elements."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                gradient = param.grad.reshape(len(param), -1)
                size = self.state[param].setdefault("size", torch.ones(len(param), 1, dtype=param.dtype))
                size.lerp_(gradient.square().mean(1, keepdim=True), 0.1)
                param.sub_(group["lr"] * (gradient / size.sqrt()).reshape(param.shape))


class OwnNoise(torch.optim.SGD):
    """Draws from a generator of its own."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=1e-2)
        self.generator = torch.Generator().manual_seed(4)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn(param.shape, generator=self.generator, dtype=param.dtype), alpha=1e-3)


class Scheduled(torch.optim.SGD):
    """Holds a scheduler, which puts a function of its own in the place of `step`."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self, 0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.schedule.step()


JOBS: dict[str, Callable[[], Job]] = {
    "info_nce": lambda: make(Plain, loss=info_nce_loss),
    "info_nce_dropout": lambda: make(partial(Plain, dropout=True), loss=info_nce_loss),
    "info_nce_batch": lambda: make(partial(Plain, dropout=True), loss=info_nce_loss, loss_over="batch"),
    "info_nce_short": lambda: make(Plain, train=_data(26), last_batch="short", loss=info_nce_loss, loss_over="batch"),
    "info_nce_micro": lambda: make(Plain, loss=info_nce_loss, loss_over="micro-batch"),
    "clip": lambda: make(TwoTowers, **CLIP),
    "clip_batch": lambda: make(TwoTowers, **CLIP, loss_over="batch"),
    "centred": lambda: make(Centred),
    "centred_dropout": lambda: make(partial(Centred, dropout=True)),
    "centred_batch": lambda: make(Centred, loss_over="batch"),
    "centred_micro": lambda: make(Centred, loss_over="micro-batch"),
    "hand_norm": lambda: make(HandNorm),
    "gated": lambda: make(Gated),
    "balanced": lambda: make(Balanced, loss=balanced_loss),
    "mean": lambda: make(Plain, loss=mean_loss),
    "wrong_count": lambda: make(Plain, loss=wrong_count_loss),
    "weighted": lambda: make(Plain, loss=weighted_loss),
    "weighted_batch": lambda: make(Plain, loss=weighted_mean, loss_over="batch"),
    "padded": lambda: make(MeanOfPadded, train=Padded()),
    "noisy": lambda: make(Noisy),
    "complex": lambda: make(Complex),
    "complex_layers": lambda: make(lambda: nn.Sequential(*(Turned() for _ in range(4)), nn.Linear(WIDTH, WIDTH))),
    "from_numpy": lambda: make(FromNumpy, train=_numpy_data()),
    "numpy_data": lambda: make(Plain, train=FromNumpyData()),
    "functional": lambda: make(Functional),
    "counting": lambda: make(Counting),
    "chaotic_12": lambda: make(partial(Chaotic, 12)),
    "chaotic_24": lambda: make(partial(Chaotic, 24)),
    "masked": lambda: make(Masked),
    "mean_seen": lambda: make(MeanSeen),
    "mean_seen_local": lambda: make(MeanSeen, buffers="local"),
    "one_element": lambda: make(Plain, loss=one_element_loss),
    "counts_nothing": lambda: make(Plain, loss=nothing_counts),
    "lbfgs": lambda: make(Plain, optimizer=partial(torch.optim.LBFGS, lr=0.1, max_iter=3), clip=None),
    "plain": lambda: make(Plain),
    "sparse": lambda: make(SparseRows, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), clip=None),
    "rare": lambda: make(Plain, loss=rare_loss),
    "by_rows": lambda: make(Plain, optimizer=ByRows),
    "own_noise": lambda: make(Plain, optimizer=OwnNoise),
    "scheduled": lambda: make(Plain, optimizer=Scheduled),
    "slow": lambda: make(Plain, optimizer=partial(torch.optim.SGD, lr=1e-6)),
}


def __getattr__(name: str) -> Any:
    if name in JOBS:
        return JOBS[name]
    raise AttributeError(name)
