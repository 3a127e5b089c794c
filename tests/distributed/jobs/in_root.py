"""Transformers whose own forward works on the sequence between its modules, as people write them by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy

WIDTH, HEADS, LENGTH, WORDS, LAYERS = 12, 6, 12, 11, 2


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, *, cap: float = 0.0) -> Tensor:
    """Attention as a function: causal, with a bias on the scores and a soft cap."""
    scores = heads(q) @ heads(k).mT / math.sqrt(q.shape[-1] // HEADS) + bias
    if cap:
        scores = cap * torch.tanh(scores / cap)
    T = q.shape[1]
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return (scores.softmax(-1) @ heads(v)).transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """The library's attention behind one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Mlp(nn.Sequential):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * WIDTH, WIDTH))


class Model(nn.Module):
    """An embedding, learned positions added in the root, and a head; subclasses write `layers`."""

    attention: Callable[[], nn.Module] = Attention

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.attentions = nn.ModuleList(type(self).attention() for _ in range(LAYERS))
        self.mlps = nn.ModuleList(Mlp() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def layers(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.layers(h))


class PreNorm(Model):
    def layers(self, h: Tensor) -> Tensor:
        for n in range(LAYERS):
            h = h + self.attentions[n](self.norms[2 * n](h))
            h = h + self.mlps[n](self.norms[2 * n + 1](h))
        return h


class PostNorm(Model):
    def layers(self, h: Tensor) -> Tensor:
        for n in range(LAYERS):
            h = self.norms[2 * n](h + self.attentions[n](h))
            h = self.norms[2 * n + 1](h + self.mlps[n](h))
        return h


class Parallel(Model):
    """Attention and MLP side by side, added in place."""

    def layers(self, h: Tensor) -> Tensor:
        for n in range(LAYERS):
            x = self.norms[n](h)
            h = h + self.attentions[n](x)
            h += self.mlps[n](x)
        return h


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class InBlock(Model):
    """The residual stream in the blocks, and a long connection around them in the root."""

    attention = Block

    def layers(self, h: Tensor) -> Tensor:
        first = h
        for block in self.attentions:
            h = block(h)
        return h + first


class Functions(Model):
    """Attention as a function that the root calls on projections of its own."""

    attention = partial(nn.Linear, WIDTH, 3 * WIDTH)
    cap = 0.0

    def bias(self, T: int) -> Tensor | float:
        return 0.0

    def layers(self, h: Tensor) -> Tensor:
        for n in range(LAYERS):
            h = h + attend(*self.attentions[n](self.norms[2 * n](h)).chunk(3, -1), self.bias(h.shape[1]), cap=self.cap)
            h = h + self.mlps[n](self.norms[2 * n + 1](h))
        return h


class Capped(Functions):
    cap = 2.0


class Alibi(Functions):
    def bias(self, T: int) -> Tensor:
        place = torch.arange(T)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return slopes[:, None, None] * (place[None] - place[:, None])


class Library(Functions):
    """F.scaled_dot_product_attention in the root, with a mask made there."""

    def layers(self, h: Tensor) -> Tensor:
        seen = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
        for n in range(LAYERS):
            q, k, v = (heads(part) for part in self.attentions[n](self.norms[2 * n](h)).chunk(3, -1))
            h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(-2)
            h = h + self.mlps[n](self.norms[2 * n + 1](h))
        return h


class Multihead(Model):
    """nn.MultiheadAttention, called by the root with a mask."""

    attention = partial(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
    weights = False

    def layers(self, h: Tensor) -> Tensor:
        T = h.shape[1]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        for n in range(LAYERS):
            x = self.norms[2 * n](h)
            mixed, _ = self.attentions[n](x, x, x, attn_mask=hidden, need_weights=self.weights)
            h = h + mixed
            h = h + self.mlps[n](self.norms[2 * n + 1](h))
        return h


class MultiheadWeights(Multihead):
    weights = True


class Tied(PreNorm):
    """A head that is the embedding, positions in a parameter, padding hidden from attention."""

    attention = partial(nn.Linear, WIDTH, 3 * WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.linspace(-1, 1, 2 * LENGTH * WIDTH).view(1, 2 * LENGTH, WIDTH))
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, self.embed.weight)
        h = h + self.positions[:, : tokens.shape[1]]
        hidden = (tokens == 0)[:, None, None, :]
        for n in range(LAYERS):
            q, k, v = self.attentions[n](self.norms[2 * n](h)).chunk(3, -1)
            scores = (heads(q) @ heads(k).mT).masked_fill(hidden, -1e9)
            h = h + (scores.softmax(-1) @ heads(v)).transpose(1, 2).flatten(-2)
            h = h + self.mlps[n](self.norms[2 * n + 1](h))
        return self.head(h)


class Pooled(PreNorm):
    """Answers once for a sample."""

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.layers(h).mean(1))


class Patches(PreNorm):
    """Pieces of an image: the sequence begins behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        h = self.patch(image).flatten(2).transpose(1, 2) + self.place.weight
        return self.head(self.layers(h)[:, 0])


class Dropping(PreNorm):
    """With dropout in the root and in its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp(0.2) for _ in range(LAYERS))

    def layers(self, h: Tensor) -> Tensor:
        for n in range(LAYERS):
            h = h + F.dropout(self.attentions[n](self.norms[2 * n](h)), 0.2, self.training)
            h = h + self.mlps[n](self.norms[2 * n + 1](h))
        return h


class Looped(PreNorm):
    """The same layers twice."""

    def layers(self, h: Tensor) -> Tensor:
        return super().layers(super().layers(h))


class Translation(nn.Module):
    """nn.Transformer from a source to a target that is shorter: the source is cut, the target is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.translate = nn.Transformer(WIDTH, HEADS, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        target = self.words(tokens[:, : LENGTH // 2 - 1])
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.translate(self.words(tokens), target, tgt_mask=later, tgt_is_causal=True))


class Shifted(PreNorm):
    """Mixes positions outside attention: each meets its neighbour, as in RWKV."""

    def layers(self, h: Tensor) -> Tensor:
        h = super().layers(h)
        return super().layers(h + F.pad(h, (0, 0, 1, -1)))


class Centred(PreNorm):
    """Mixes positions outside attention: a mean over them between two layers."""

    def layers(self, h: Tensor) -> Tensor:
        h = super().layers(h)
        return super().layers(h - h.mean(1, keepdim=True))


class Mixer(Model):
    """Mixes positions by a matrix in place of attention, once."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def layers(self, h: Tensor) -> Tensor:
        h = h + self.attentions[0](h)
        h = h + self.mix(h.transpose(1, 2)).transpose(1, 2)
        return h + self.attentions[1](h)


def job_of(model: Callable[[], nn.Module], kind: str = "words") -> Job:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(1, WORDS, (16, LENGTH), generator=generator)
    x[::2, -3:] = 0
    y = torch.randint(0, WORDS, (16, LENGTH) if kind == "words" else (16,), generator=generator)
    if kind == "shorter":
        y = torch.randint(0, WORDS, (16, LENGTH // 2 - 1), generator=generator)
    if kind == "images":
        x = torch.randn(16, 1, 6, 8, generator=generator)
    return Job(
        name="in_root",
        model=model,
        train=TensorData(x=x, y=y),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        global_batch=4,
        steps=4,
    )


pre_norm = partial(job_of, PreNorm)
post_norm = partial(job_of, PostNorm)
parallel = partial(job_of, Parallel)
in_block = partial(job_of, InBlock)
functions = partial(job_of, Functions)
capped = partial(job_of, Capped)
alibi = partial(job_of, Alibi)
library = partial(job_of, Library)
multihead = partial(job_of, Multihead)
multihead_weights = partial(job_of, MultiheadWeights)
tied = partial(job_of, Tied)
pooled = partial(job_of, Pooled, "answers")
patches = partial(job_of, Patches, "images")
dropping = partial(job_of, Dropping)
looped = partial(job_of, Looped)
translation = partial(job_of, Translation, "shorter")
shifted = partial(job_of, Shifted)
centred = partial(job_of, Centred)
mixer = partial(job_of, Mixer)
