"""Small jobs with one awkward thing each: what a module tree, an optimiser or a batch can be in the wild.

Every entry of JOBS builds a Job. Models are a few dozen parameters, so a proof of one takes milliseconds once
ranks are up. A global batch of 12 divides among 2, 3 and 4 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.job import DecayMatrices, Job, TensorData, cross_entropy, no_options
from shoal.job.tasks.image import image
from shoal.job.tasks.language import language

WIDTH = 6
CLASSES = 5


def vectors(num: int = 60) -> TensorData:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num, WIDTH, generator=generator)
    return TensorData(x=x, y=torch.randint(0, CLASSES, (num,), generator=generator))


def mostly_ignored() -> TensorData:
    data = vectors()
    generator = torch.Generator().manual_seed(5)
    kept = torch.rand(len(data), generator=generator) < 0.15
    return TensorData(x=data.tensors["x"], y=torch.where(kept, data.tensors["y"], -100))


def of_the_others(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return nn.functional.cross_entropy(output, batch["y"], reduction="sum"), (batch["y"] >= 0).sum()


def images(num: int = 60) -> TensorData:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(num, 2, 3, 3, generator=generator)
    return TensorData(x=x, y=torch.randint(0, CLASSES, (num,), generator=generator))


def tokens(num: int = 60) -> TensorData:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 11, (num, 4), generator=generator)
    return TensorData(x=x, y=torch.randint(0, 11, (num, 4), generator=generator))


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make(model: Callable[[], nn.Module], **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "odd",
        "model": model,
        "train": vectors(),
        "loss": cross_entropy,
        "optimizer": ADAMW,
        "clip": 0.5,
        "global_batch": 12,
        "steps": 6,
    }
    return Job(**(settings | changes))


class Residual(nn.Module):
    """A block: a norm, a layer and a way around them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Chain(nn.Module):
    """Blocks and a head: the ordinary case that the odd ones depart from."""

    def __init__(self, blocks: int = 3, make_block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def only_matrices() -> nn.Module:
    """Nothing but matrices, as Muon wants them."""
    layers = [nn.Linear(width, height, bias=False) for width, height in ((WIDTH, 8), (8, 8), (8, CLASSES))]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def wide_layers() -> nn.Module:
    """Large enough that compressing its gradients pays."""
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, CLASSES))


def only_linear() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


class Unused(Chain):
    """A layer that nothing calls, in a block and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].spare = nn.Linear(WIDTH, 2)


def partly_frozen() -> nn.Module:
    model = Chain()
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    model.blocks[0].norm.weight.requires_grad_(False)
    return model


class Buffers(Chain):
    """Buffers of every kind: whole numbers that count, truth values, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 != 1)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("narrow", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.mask)


class Repeated(nn.Module):
    """One block applied three times, between two others, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(), Residual(), Residual()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 1, 1, 0, 2):
            x = self.layers[number](x)
        return self.head(x)


class Returning(Repeated):
    """Comes back to its first block at the end, when the block behind that has had its turn."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 0):
            x = self.layers[number](x)
        return self.head(x)


class Scaled(Chain):
    """A scalar parameter beside matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Tuples(Residual):
    """Gives back its input beside its output, and takes such a pair."""

    def forward(self, pair: Any) -> Any:
        x, _ = pair if isinstance(pair, tuple) else (pair["x"], None)
        return super().forward(x), x


class Mappings(Residual):
    def forward(self, pair: Any) -> Any:
        x, _ = pair
        return {"x": super().forward(x), "note": "text", "nothing": None}


@dataclass
class Answer:
    """An output that no library knows how to look into."""

    x: Tensor


class Answers(Residual):
    def forward(self, pair: Any) -> Any:
        return Answer(super().forward(pair[0]))


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Tuples(), Mappings(), Tuples(), Answers(), Residual()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        value: Any = (x, None)
        for block in self.blocks[:-1]:
            value = block(value)
        return self.head(self.blocks[-1](value.x))


class Primes(nn.Module):
    """Parameters of 1, 3, 7 and 13 elements and of none: padding is most of their buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.zeros(0))
        self.layers = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 13, bias=False))
        self.head = nn.Linear(13, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x) * self.scale + self.one + self.none.sum())


class Tied(nn.Module):
    """The head is the embedding, and two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InPlace(nn.Module):
    """Activations that overwrite what a block gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Loose(nn.Module):
    """Lists whose entries are never called: parameters bare, and layers grouped in dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mix": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)
        )
        self.gains = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(WIDTH))]) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for stage, gains in zip(self.stages, self.gains, strict=True):
            x = x + gains[0] * torch.tanh(stage["mix"](stage["norm"](x)))
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, WIDTH // 2).repeat(1, 1, 2)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


class Sparse(nn.Module):
    """An embedding whose gradient names only the rows it touched."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


class Convolutions(nn.Module):
    """Batch norm with a bias before it, whose true gradient is zero."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=momentum),
            nn.ReLU(),
            nn.Conv2d(4, 3, 3, padding=1, bias=False),
            nn.BatchNorm2d(3, affine=False),
            nn.Tanh(),
        )
        self.head = nn.Linear(27, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class ActiveNorm(nn.BatchNorm2d):
    """As in timm: the activation is in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) + 0.1 * x


class NormFunction(nn.Module):
    """Calls batch norm as a function and keeps its statistics by other names."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, self.scale, None, self.training, 0.2)


class OwnNorms(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.features[1], self.features[4] = ActiveNorm(4), NormFunction(3)


class Spectral(Chain):
    """Forward advances the vectors of spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.parametrizations.spectral_norm(block.up)


class Replaced(Chain):
    """Keeps a running mean in a buffer that each forward replaces by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return super().forward(x)


class Counted(nn.Module):
    """A block that counts its calls below its attributes, and computes with the count."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.notes = inner, SimpleNamespace(calls=[0], sums={"all": torch.zeros(())})

    def forward(self, x: Tensor) -> Tensor:
        self.notes.calls[0] += 1
        self.notes.sums["all"].add_(1.0)
        return self.inner(x) * (1 + 0.1 * self.notes.calls[0]) - 0.01 * float(self.notes.sums["all"])


class Counting(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted(block) for block in self.blocks])


class FrozenNorm(Convolutions):
    """Keeps its first batch norm as it was pretrained, whatever mode the rest is in."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.features[1].eval()
        return self


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Residual(), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class DropsInside(nn.Module):
    """A block whose recomputation needs its mask again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.drop(self.up(x))))


class DroppingInside(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropsInside() for _ in range(3))


class Late(Chain):
    """A layer that takes no part until the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x if self.calls == 1 else x + self.gate(x))


class Sometimes(Chain):
    """A layer for rare samples only: a rank that has none of them in its share does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 1.0
        if rare.any():
            x = torch.where(rare[:, None], self.rare(x), x)
        return super().forward(x)


class RareInside(Residual):
    """A block with a layer for rare samples only: all ranks call the block, some without any use of that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 1.5
        if rare.any():
            x = torch.where(rare[:, None], self.rare(x), x)
        return super().forward(x)


class Reaching(Chain):
    """Reads a weight of a block from outside the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[0].up.weight.square().sum()


class TrustRatio(torch.optim.Optimizer):
    """Like LAMB: each parameter's step is scaled by the norms of the whole parameter and its update."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.mul_(0.9).add_(param.grad, alpha=0.1)
                    ratio = param.norm() / average.norm().clamp(min=1e-12)
                    param.sub_(average * ratio, alpha=group["lr"])


JOBS: dict[str, Callable[[], Job]] = {
    "plain": lambda: make(Chain),
    "sgd": lambda: make(Chain, optimizer=partial(torch.optim.SGD, lr=0.1), clip=None),
    "momentum": lambda: make(Chain, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "decay": lambda: make(Chain, options=DecayMatrices(weight_decay=0.2)),
    "rates": lambda: make(Chain, options=_own_rates, schedule=lambda step: 1 / (1 + step)),
    "tensor_rate": lambda: make(
        Chain,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)),
        schedule=lambda step: 1 / (1 + step),
    ),
    "adagrad": lambda: make(Chain, optimizer=partial(torch.optim.Adagrad, lr=0.05)),
    "rmsprop": lambda: make(Chain, optimizer=partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)),
    "trust": lambda: make(Chain, optimizer=TrustRatio),
    "matrices": lambda: make(only_matrices, optimizer=partial(torch.optim.Muon, lr=1e-2)),
    "dropout": lambda: make(Dropping),
    "dropout_inside": lambda: make(DroppingInside, clip=None),
    "tied": lambda: make(Tied, train=tokens()),
    "unused": lambda: make(Unused),
    "frozen": lambda: make(partly_frozen),
    "buffers": lambda: make(Buffers),
    "wide": lambda: make(wide_layers),
    "one_linear": lambda: make(only_linear),
    "repeated": lambda: make(Repeated),
    "returning": lambda: make(Returning),
    "scaled": lambda: make(Scaled, optimizer=partial(torch.optim.Adafactor, lr=0.05)),
    "structures": lambda: make(Structures),
    "primes": lambda: make(Primes),
    "in_place": lambda: make(InPlace),
    "loose": lambda: make(Loose),
    "recurrent": lambda: make(Recurrent),
    "sparse": lambda: make(Sparse, train=tokens(), optimizer=partial(torch.optim.SGD, lr=0.1), clip=None),
    "norm": lambda: make(Convolutions, train=images()),
    "cumulative_norm": lambda: make(partial(Convolutions, momentum=None), train=images()),
    "own_norms": lambda: make(OwnNorms, train=images()),
    "short_own_norms": lambda: make(OwnNorms, train=images(25), last_batch="short"),
    "spectral": lambda: make(Spectral),
    "replaced": lambda: make(Replaced, buffers="average"),
    "counting": lambda: make(Counting),
    "frozen_norm": lambda: make(FrozenNorm, train=images()),
    "local_norm": lambda: make(Convolutions, train=images(), batch_norm="local"),
    "local_image": lambda: image("vgg", "tiny", batch_norm="local"),
    "diverging": lambda: make(Chain, optimizer=partial(torch.optim.SGD, lr=1e38), clip=None),
    "late": lambda: make(Late),
    "sometimes": lambda: make(Sometimes),
    "rare_inside": lambda: make(partial(Chain, make_block=RareInside)),
    "reaching": lambda: make(Reaching),
    # The third batch is of 2 samples, or of 1: some ranks have none, and with micro-batches some of these are empty.
    "short": lambda: make(Chain, train=vectors(26), last_batch="short"),
    "short_norm": lambda: make(Convolutions, train=images(25), last_batch="short"),
    # Batches of 12 and 7: the shares differ.
    "uneven": lambda: make(Chain, train=vectors(19), last_batch="short"),
    # Of most samples nothing counts, so that the share of an island may count nothing.
    "ignored": lambda: make(Chain, train=mostly_ignored(), loss=of_the_others, clip=None),
    "uneven_norm": lambda: make(Convolutions, train=images(19), last_batch="short"),
    "uneven_tokens": lambda: language("tiny", ignore_fraction=0.6, global_batch=12),
}


def _own_rates(name: str, param: Tensor) -> dict[str, Any]:
    return {"lr": 0.003} if "norm" in name else {"weight_decay": 0.1} if "head" in name else no_options(name, param)


def __getattr__(name: str) -> Any:
    """`odd.py:name` is a job."""
    if name in JOBS:
        return JOBS[name]
    raise AttributeError(name)
