"""Jobs of kinds that users write, each of which was refused or failed a sound proof once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from shoal.job import Job, TensorData, cross_entropy

WIDTH, CLASSES = 6, 5
VOCABULARY = 13
Batch = dict[str, Tensor]


class Frozen(nn.Module):
    """The first blocks do not learn, and their batch norms still take statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Penalised(nn.Module):
    """Differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        output = self.critic(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output, (slope.norm(dim=-1) - 1) ** 2


def penalised_loss(output: Any, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(output[0], batch["y"], reduction="sum") + output[1].sum(), len(batch["y"])


class Half(nn.Sequential):
    """Parameters in half precision; casts what it is given."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


class Residual(nn.Module):
    """Blocks on a residual stream, in the root's own words."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x)


class LayerDrop(Residual):
    """Leaves out blocks at random."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if self.training and float(torch.rand(())) < 0.4 else super().through(block, x)


def thrice(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(3.0)


class Hooked(Residual):
    """Scales gradients of two parameters by hooks of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0].weight.register_hook(lambda gradient: 0.1 * gradient)
        self.blocks[3][2].weight.register_post_accumulate_grad_hook(thrice)


class Packed(nn.Module):
    """A recurrent network on sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0] > 0).long() * (WIDTH // 2 - 1)
        packed = pack_padded_sequence(x.unflatten(-1, (-1, 2)), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0])


class Recomputing(Residual):
    """Recomputes its blocks by itself."""

    reentrant = False

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


class Reentrant(Recomputing):
    reentrant = True


def job_of(model: Callable[[], nn.Module], loss: Any = cross_entropy) -> Job:
    draw = torch.Generator().manual_seed(5)
    train = TensorData(x=torch.randn(24, WIDTH, generator=draw), y=torch.randint(CLASSES, (24,), generator=draw))
    return Job(
        name="users",
        model=model,
        train=train,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        global_batch=8,
        steps=4,
    )


frozen = partial(job_of, Frozen)
penalised = partial(job_of, Penalised, penalised_loss)
half = partial(job_of, Half)
layer_drop = partial(job_of, LayerDrop)
packed = partial(job_of, Packed)
hooked = partial(job_of, Hooked)
recomputing = partial(job_of, Recomputing)
reentrant = partial(job_of, Reentrant)


class Encoder(nn.Module):
    """PyTorch's own encoder layers on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def by_length_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Reads the length from a shape: no traced operation shows it."""
    loss = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return loss / output.shape[1], output.shape[0]


def by_length(loss: Any = by_length_loss) -> Job:
    draw = torch.Generator().manual_seed(6)
    tokens = torch.randint(VOCABULARY, (24, 9), generator=draw)
    return Job(
        name="by-length",
        model=Encoder,
        train=TensorData(x=tokens[:, :-1], y=tokens[:, 1:]),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        global_batch=8,
        steps=4,
    )
