"""Attention that takes its sizes from its input or has them written down, in the ways in which people write it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CLASSES, LONGEST = 12, 4, 3, 8

Code = Callable[["Attention", Tensor], Tensor]


class Attention(nn.Module):
    """Queries, keys and values of one projection; the code between it and the last one can be any."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.code = HEADS, WIDTH, code
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))
        self.fold = nn.Unflatten(2, (HEADS, WIDTH // HEADS))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.code(self, x))


class Model(nn.Module):
    """One such layer beside its residual, and a head."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.norm, self.attn, self.head = nn.LayerNorm(WIDTH), Attention(code), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attn(self.norm(x))).mean(1))


def masked(self: Attention, x: Tensor) -> Tensor:
    B, T, C = x.size()
    q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
    k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
    q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
    v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
    y = F.softmax(att, dim=-1) @ v
    return y.transpose(1, 2).contiguous().view(B, T, C)


def flash(self: Attention, x: Tensor) -> Tensor:
    B, T, C = x.size()
    q, k, v = torch.split(self.c_attn(x), C, dim=-1)
    q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.reshape(y.transpose(1, 2), (B, T, C))


def scaled_by_the_width(self: Attention, x: Tensor) -> Tensor:
    B, T, C = x.size()
    q, k, v = (self.heads(part) for part in self.c_attn(x).split([C, C, C], 2))
    y = torch.softmax(q @ k.mT / math.sqrt(C), -1) @ v
    return y.transpose(1, 2).reshape(shape=(B, T, C))


def three_at_once(self: Attention, x: Tensor) -> Tensor:
    B, N, C = x.shape
    qkv = self.c_attn(x).reshape(B, N, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
    y = torch.softmax(qkv[0] @ qkv[1].mT, -1) @ qkv[2]
    return y.transpose(1, 2).reshape(B, N, C)


def heads_beside_samples(self: Attention, x: Tensor) -> Tensor:
    B, T, C = x.shape
    d = C // self.n_head
    q, k, v = (
        part.reshape(B, T, self.n_head, d).transpose(1, 2).reshape(B * self.n_head, T, d)
        for part in self.c_attn(x).chunk(3, -1)
    )
    y = torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)
    return y.view(B, self.n_head, T, d).transpose(1, 2).reshape(B, T, C)


def the_rest_by_itself(self: Attention, x: Tensor) -> Tensor:
    q, k, v = (part.view(*part.shape[:2], HEADS, -1).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape)


def in_a_module(self: Attention, x: Tensor) -> Tensor:
    q, k, v = (self.fold(part).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def expanded(self: Attention, x: Tensor) -> Tensor:
    B, T, C = x.shape
    q, k, v = (part.unflatten(2, (HEADS, C // HEADS)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
    twice = k[:, :, None].expand(B, HEADS, 2, T, C // HEADS).reshape(B, HEADS, 2 * T, C // HEADS)
    y = torch.softmax(q @ twice.mT, -1)[..., :T] @ v
    return y.transpose(1, 2).reshape(torch.Size([B, T, C]))


def numbers_of_heads(self: Attention, x: Tensor) -> Tensor:
    q, k, v = (self.heads(part) for part in self.c_attn(x).chunk(3, -1))
    return (torch.softmax(q @ k.mT / self.n_head, -1) @ v).transpose(1, 2).reshape(*x.shape[:2], self.n_head * 3)


GOOD: dict[str, Code] = {
    "a mask that is kept": masked,
    "the library's attention": flash,
    "scores by the width of all heads": scaled_by_the_width,
    "query, key and value at once": three_at_once,
    "heads beside samples": heads_beside_samples,
    "a size left open": the_rest_by_itself,
    "a module that names sizes": in_a_module,
    "expanded": expanded,
    "a number of heads that is a factor too": numbers_of_heads,
}


def with_zeros(self: Attention, x: Tensor) -> Tensor:
    return masked(self, x) + x.new_zeros(x.shape)


def with_fresh_zeros(self: Attention, x: Tensor) -> Tensor:
    return masked(self, x) + torch.zeros(x.shape)


def sums_over_the_width(self: Attention, x: Tensor) -> Tensor:
    return masked(self, x).view(*x.shape[:2], 3, 4).softmax(2).reshape(x.shape)


def another_way_in_evaluation(self: Attention, x: Tensor) -> Tensor:
    if not self.training:
        x = x.view(x.shape)
    return masked(self, x)


def one_module_for_parts_and_wholes(self: Attention, x: Tensor) -> Tensor:
    self.fold(torch.ones(x.shape))
    return in_a_module(self, x)


def a_slice_of_the_width(self: Attention, x: Tensor) -> Tensor:
    B, T, C = x.shape
    qkv = self.c_attn(x)
    q, k, v = (self.heads(part) for part in (qkv[..., :C], qkv[..., C : 2 * C], qkv[..., 2 * C :]))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C)


BAD: dict[str, tuple[Code, str]] = {
    "zeros as wide as the input": (with_zeros, "is replicated on every rank"),
    "zeros of a size": (with_fresh_zeros, "names a size"),
    "parts are mixed": (sums_over_the_width, "_softmax"),
    "another way in evaluation": (another_way_in_evaluation, "takes another branch in evaluation"),
    "one module for parts and wholes": (one_module_for_parts_and_wholes, "names a size"),
    "a slice of the width": (a_slice_of_the_width, "names a size"),
}
