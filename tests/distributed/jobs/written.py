"""Attention as models spell it: by hand, with masks of their own, in PyTorch's own layers. Each job has a name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy

WIDTH, HEADS, LENGTH, WORDS = 8, 4, 12, 11


class Attention(nn.Module):
    """Query, key and value in one projection; subclasses say how they attend."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(q, k, v, padding).transpose(1, 2).flatten(-2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        raise NotImplementedError


class ByHand(Attention):
    """nanoGPT's: a triangle in a buffer, as long as the sequence that is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triangle", torch.ones(2 * LENGTH, 2 * LENGTH).tril()[None, None])

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        length = q.size(2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.triangle[:, :, :length, :length] == 0, float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), 0.0) @ v


class SoftCapped(Attention):
    """Gemma 2's cap, with a mask that is added and one head of keys for two of queries."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        k, v = (x[:, ::2].repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.tanh(torch.matmul(q, k.mT) / 5.0) * 5.0
        hidden = torch.full((q.shape[-2], q.shape[-2]), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        scores = scores + hidden + torch.where(padding, 0.0, -1e9).to(q.dtype)[:, None, None]
        return torch.matmul(torch.softmax(scores, -1, dtype=q.dtype), v)


class Alibi(Attention):
    """Bloom's: heads in the batch, and a bias that grows with the distance, in one baddbmm."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        batch, heads, length, width = q.shape
        slopes = torch.arange(1, heads + 1, dtype=q.dtype) / heads
        bias = slopes[:, None, None] * torch.arange(length, dtype=q.dtype)
        bias = bias.repeat(batch, 1, 1)
        q, k, v = (x.reshape(batch * heads, length, width) for x in (q, k, v))
        scores = bias.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=width**-0.5).view(batch, heads, length, length)
        position = torch.arange(length)
        scores = scores.masked_fill(position > position[:, None], torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1).view(batch * heads, length, length)
        return torch.bmm(weights, v).view(batch, heads, length, width)


class Einsum(Attention):
    """Letters, an exponential instead of a softmax, and a learned bias by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS * 2 * LENGTH).view(HEADS, -1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        position = torch.arange(q.shape[2])
        apart = position[:, None] - position + LENGTH
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + self.bias[:, apart]
        scores = scores.masked_fill(~padding[:, None, None], -1e9)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return torch.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdim=True), v)


class OwnMask(Attention):
    """The library's attention under a mask that the module makes."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() & padding[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class LearnedBias(Attention):
    """The library's attention with a bias that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH * LENGTH).view(1, 1, LENGTH, LENGTH))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, scale=0.3)


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), padding)
        return x + self.mlp(x)


class Inline(nn.Module):
    """A block that does everything itself, positions included."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.place = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        B, T, C = x.shape
        y = x + self.place(torch.arange(T))
        q, k, v = (each(y).view(B, T, HEADS, C // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(2, 3) + torch.ones(T, T).triu(1) * -1e9, -1)
        x = x + (weights @ v).transpose(1, 2).contiguous().view(B, T, C)
        return x + self.down(torch.relu(self.up(x)))


class Given(nn.Module):
    """The library's attention under whatever mask the model hands to its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (q, k, v))
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.6)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.TransformerEncoderLayer):
    """PyTorch's own layer."""

    def __init__(self, *, first: bool = True, weights: bool = False) -> None:
        super().__init__(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=first, norm_first=True)
        self.weights = weights

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        if self.weights:
            mixed, _ = self.self_attn(x, x, x, key_padding_mask=~padding, need_weights=True)
            return x + mixed
        return super().forward(x, src_key_padding_mask=~padding)


class Model(nn.Module):
    """Blocks between an embedding and a head. `first`: samples come before positions."""

    def __init__(self, block: Callable[[], nn.Module], *, first: bool = True, mask: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.first, self.mask = first, mask

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens != 0
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        x = x if self.first else x.transpose(0, 1)
        extra = self.given(padding, x.dtype) if self.mask else padding
        for block in self.blocks:
            x = block(x, extra)
        return self.head(x if self.first else x.transpose(0, 1))

    def given(self, padding: Tensor, dtype: torch.dtype) -> Tensor:
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        masks = {
            "padding": padding[:, None, None],
            "flat": padding,
            "both": padding[:, None, None] & causal,
            "causal": causal[None, None],
            "added": torch.zeros(LENGTH, LENGTH, dtype=dtype).masked_fill(~causal, -1e9)[None, None],
            "added padding": torch.zeros(padding.shape, dtype=dtype).masked_fill(~padding, -1e9)[:, None, None],
        }
        return masks[self.mask]


def job_of(model: Callable[[], nn.Module]) -> Job:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(1, WORDS, (16, LENGTH), generator=generator)
    x[::2, -3:] = 0
    y = torch.randint(0, WORDS, (16, LENGTH), generator=generator)
    return Job(
        name="written",
        model=model,
        train=TensorData(x=x, y=y),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        global_batch=4,
        steps=4,
    )


def _of(attention: Callable[[], nn.Module]) -> Job:
    return job_of(partial(Model, partial(Block, attention)))


by_hand = partial(_of, ByHand)
soft_capped = partial(_of, SoftCapped)
alibi = partial(_of, Alibi)
einsum = partial(_of, Einsum)
own_mask = partial(_of, OwnMask)
learned_bias = partial(_of, LearnedBias)
inline = partial(job_of, partial(Model, Inline))
layer = partial(job_of, partial(Model, Layer))
layer_weights = partial(job_of, partial(Model, partial(Layer, weights=True)))
layer_second = partial(job_of, partial(Model, partial(Layer, first=False), first=False))
mask_padding = partial(job_of, partial(Model, Given, mask="padding"))
mask_flat = partial(job_of, partial(Model, Given, mask="flat"))
mask_both = partial(job_of, partial(Model, Given, mask="both"))
mask_causal = partial(job_of, partial(Model, Given, mask="causal"))
mask_added = partial(job_of, partial(Model, Given, mask="added"))
mask_added_padding = partial(job_of, partial(Model, Given, mask="added padding"))
