"""Three models written as one writes them on one machine, with no thought of cutting them, each as a Job.

An encoder-decoder whose skips jump over its middle, an LSTM with a head, and a mixture of experts made of a list and a
loop. All of them have targets that are not counted, so that samples carry unequal weight. Sizes divide by 2, 3 and 4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData

BATCH, SAMPLES, CLASSES = 12, 60, 5
IGNORED = -100


def make(name: str, model: Any, x: Tensor, y: Tensor, loss: Any) -> Job:
    ignored = torch.rand(y.shape, generator=torch.Generator().manual_seed(9)) < 0.3
    # Whole samples may count for nothing as well.
    ignored[::7] = True
    return Job(
        name=name,
        model=model,
        train=TensorData(x=x, y=y.masked_fill(ignored, IGNORED)),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        clip=1.0,
        global_batch=BATCH,
        steps=20,
    )


def by_place(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over every pixel or token whose target counts; classes come last."""
    target = batch["y"]
    total = F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Classifies each pixel; two skips pass by everything that lies below them."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enc1, self.enc2 = DoubleConv(1, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.dec2 = DoubleConv(4 * width, width)
        self.up1 = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.dec1 = DoubleConv(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        y = self.dec2(torch.cat([self.up2(c), b], dim=1))
        y = self.dec1(torch.cat([self.up1(y), a], dim=1))
        return self.head(y).permute(0, 2, 3, 1)


def unet() -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES, 8, 8), generator=generator)
    return make("unet", UNet, x, y, by_place)


class Tagger(nn.Module):
    """Two layers of LSTM and a head that tags each moment of a series."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, width, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        return self.head(self.norm(states))


def lstm() -> Job:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 24, 3, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES, 24), generator=generator)
    return make("lstm", Tagger, x, y, by_place)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Each token asks the two experts that its router likes best. Gives back the answer, and how sure the router was of
    each token: a sum of that keeps the load balanced."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens)
        weights, choices = scores.softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(choices == number)
            if len(token):
                mixed = mixed.index_add(0, token, weights[token, slot, None] * expert(tokens[token]))
        return mixed.view_as(x), scores.logsumexp(-1).square().view(x.shape[:-1])


class Layer(nn.Module):
    def __init__(self, width: int, experts: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = Mixture(width, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        mixed, sure = self.mixture(self.norm2(x))
        return x + mixed, sure


class MixtureOfExperts(nn.Module):
    def __init__(self, *, vocabulary: int = 13, width: int = 24, experts: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, experts, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        prices = []
        for layer in self.layers:
            x, sure = layer(x)
            prices.append(sure)
        return self.head(self.norm(x)), torch.stack(prices).sum(0)


def balanced_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over tokens of their losses and, for every token, of a small price on the router's certainty."""
    logits, sure = output
    total, count = by_place(logits, batch)
    return total + 0.01 * sure.sum(), count


class RunningTotal(MixtureOfExperts):
    """The same price, added up on the way: the total is no layer's argument and no layer's result."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        total = torch.zeros(())
        for layer in self.layers:
            x, sure = layer(x)
            total = total + sure
        return self.head(self.norm(x)), total


def sentences() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 13, (SAMPLES, 25), generator=torch.Generator().manual_seed(3))
    return text[:, :-1], text[:, 1:]


def moe() -> Job:
    return make("moe", MixtureOfExperts, *sentences(), balanced_loss)


def running_total() -> Job:
    return make("running-total", RunningTotal, *sentences(), balanced_loss)
