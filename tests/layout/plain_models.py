"""Models written without parallelism in mind: what lies between two projections can be anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy

WIDTH, HEADS, TOKENS, CLASSES = 12, 4, 5, 3


def sequences() -> TensorData:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, TOKENS, WIDTH, generator=generator)
    return TensorData(x=x, y=torch.randint(0, CLASSES, (8,), generator=generator))


def pictures() -> TensorData:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 2, 8, 8, generator=generator)
    return TensorData(x=x, y=torch.randint(0, CLASSES, (8,), generator=generator))


def job_of(model: Callable[[], nn.Module], data: TensorData | None = None) -> Job:
    return Job(
        name="plain",
        model=model,
        train=data or sequences(),
        loss=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=4,
        steps=1,
    )


class Between(nn.Module):
    """A projection, some code, a projection, and an end that needs everything."""

    def __init__(self, wide: int, narrow: int, code: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(narrow, CLASSES)
        self.code = code
        self.heads, self.wide, self.half = HEADS, wide, wide // 2

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.code(self, self.up(x)))[:, 0]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def three_in_front(self: Between, x: Tensor) -> Tensor:
    q, k, v = x.view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v)


def three_per_head(self: Between, x: Tensor) -> Tensor:
    q, k, v = x.view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
    return attend(q, k, v)


def chunks_then_heads(self: Between, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in x.chunk(3, dim=2))
    return attend(q, k, v)


def scores_written_out(self: Between, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in x.chunk(3, dim=2))
    weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v).reshape(*x.shape[:2], -1)


def heads_in_the_batch(self: Between, x: Tensor) -> Tensor:
    x = x.view(*x.shape[:2], self.heads, -1).transpose(1, 2).reshape(x.shape[0] * self.heads, x.shape[1], -1)
    x = torch.bmm(torch.softmax(torch.bmm(x, x.transpose(1, 2)), -1), x)
    return x.view(-1, self.heads, *x.shape[1:]).transpose(1, 2).flatten(2)


def few_key_heads(self: Between, x: Tensor) -> Tensor:
    width = x.shape[-1] // (self.heads * 2)
    q, k, v = x.split([self.heads * width, self.heads // 2 * width, self.heads // 2 * width], dim=-1)
    q, k, v = (part.unflatten(2, (-1, width)).transpose(1, 2) for part in (q, k, v))
    return attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def slices_of_fixed_size(self: Between, x: Tensor) -> Tensor:
    return x[..., : self.half] * torch.sigmoid(x[..., self.half :])


def every_other(self: Between, x: Tensor) -> Tensor:
    return x[..., ::2] * x[..., 1::2].tanh()


GOOD: dict[str, tuple[int, int, Callable[[Between, Tensor], Tensor], int]] = {
    # width after the first, width before the second, code, parts
    "an activation": (24, 24, lambda self, x: F.gelu(x), 24),
    "several": (24, 24, lambda self, x: F.silu(x) * x.clamp(min=0).pow(2) + 1, 24),
    "dropout": (24, 24, lambda self, x: F.dropout(x, 0.0), 24),
    "halves by glu": (24, 12, lambda self, x: F.glu(x), 12),
    "halves by chunk": (24, 12, lambda self, x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1].relu(), 12),
    "halves by a size": (24, 12, slices_of_fixed_size, 12),
    "neighbours": (24, 12, every_other, 12),
    "doubled": (12, 24, lambda self, x: torch.cat([x, x.neg()], -1), 12),
    "stacked": (12, 24, lambda self, x: torch.stack([x, x.sin()], -1).flatten(-2), 12),
    "repeated": (12, 24, lambda self, x: x.repeat(1, 1, 2), 12),
    "over the tokens": (24, 24, lambda self, x: x - x.mean(1, keepdim=True), 24),
    "running sums": (24, 24, lambda self, x: x.cumsum(1), 24),
    "query, key, value in front": (36, 12, three_in_front, 4),
    "query, key, value per head": (36, 12, three_per_head, 4),
    "query, key, value in chunks": (36, 12, chunks_then_heads, 4),
    "scores written out": (36, 12, scores_written_out, 4),
    "heads in the batch": (24, 24, heads_in_the_batch, 4),
    "few key heads": (24, 12, few_key_heads, 2),
    "a norm in each head": (
        24,
        24,
        lambda self, x: F.layer_norm(x.unflatten(-1, (self.heads, -1)), (6,)).flatten(-2),
        4,
    ),
    "a mask by code": (24, 24, lambda self, x: torch.where(x > 0, x, torch.zeros_like(x)), 24),
    "written in place": (24, 24, lambda self, x: x.clone().mul_(2).relu_(), 24),
    "heads innermost": (
        24,
        24,
        lambda self, x: x.unflatten(-1, (self.heads, -1)).transpose(-1, -2).flatten(-2),
        4,
    ),
    "a size in the code": (24, 24, lambda self, x: x.unflatten(-1, (4, 6)).sin().flatten(-2), 4),
    "zeros of the same width": (24, 24, lambda self, x: x + x.new_zeros(x.shape), 24),
}

BAD: dict[str, tuple[int, int, Callable[[Between, Tensor], Tensor], str]] = {
    "a width in the code": (
        24,
        24,
        lambda self, x: x.unflatten(-1, (-1, 6)).sin()[:, :, :4].flatten(-2),
        "names a size",
    ),
    "rows of another length": (24, 15, lambda self, x: x.reshape(-1, 8, 15), "mixes"),
    "a mixture of heads": (
        24,
        24,
        lambda self, x: torch.einsum("bthd,hg->btgd", x.unflatten(-1, (4, 6)), x.new_ones(4, 4)).flatten(-2),
        "sums over",
    ),
    "a norm over all": (24, 24, lambda self, x: F.layer_norm(x, (24,)), "native_layer_norm"),
    "a softmax over all": (24, 24, lambda self, x: x.softmax(-1), "_softmax"),
    "a mean over all": (24, 24, lambda self, x: x - x.mean(-1, keepdim=True), "mean"),
    "positions of features": (24, 24, lambda self, x: x * torch.arange(24.0), "fixed by the code"),
    "backwards": (24, 24, lambda self, x: x.flip(-1), "flip"),
    "rolled": (24, 24, lambda self, x: x.roll(1, -1), "roll"),
    "sorted": (24, 24, lambda self, x: x.sort(-1).values, "sort"),
    "one feature": (24, 24, lambda self, x: x * x[..., :1], ""),
    "an uneven split": (24, 24, lambda self, x: torch.cat(x.split([7, 17], -1), -1), "evenly"),
    "tokens and features merged": (
        24,
        24,
        lambda self, x: x.transpose(1, 2).reshape(x.shape[0], TOKENS, 24),
        "evenly",
    ),
}


def between(wide: int, narrow: int, code: Callable[[Between, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Between(wide, narrow, code)


class Encoder(nn.Module):
    """The library's own encoder, whose attention calls no modules."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class Block(nn.Module):
    """A residual block of a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Repeated(nn.Module):
    """One block, applied again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block[0](x)
        return self.head(x.mean(1))


class OneInTwoRoles(nn.Module):
    """A layer that is called between two others and once more at the end, on what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.up(x).relu())
        return self.down(self.mid(F.layer_norm(x, (WIDTH,))).softmax(-1))[:, 0]


class Gains(nn.Module):
    """Parameters between columns and row: one that is cut along, one that every rank needs whole."""

    def __init__(self, *, read_outside: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)
        self.gain = nn.Parameter(torch.ones(24))
        self.in_head = nn.Parameter(torch.ones(6))
        self.register_buffer("slope", torch.arange(4.0))
        self.read_outside, self.heads = read_outside, 4

    def forward(self, x: Tensor) -> Tensor:
        inside = (self.up(x) * self.gain).unflatten(-1, (self.heads, -1)) * (1 + self.in_head) * self.slope[:, None]
        y = self.down(inside.flatten(-2))[:, 0]
        return y * self.in_head.sum() if self.read_outside else y


class Gated(nn.Module):
    """Squeeze and excite: a small network inside a pair of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.groups = nn.Conv2d(8, 16, 3, padding=1, groups=4)
        self.last = nn.Conv2d(16, 4, 1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(self.norm(self.first(x)).relu())
        return self.head(self.last(F.max_pool2d(x, 2)).mean((2, 3)))


class Leaking(nn.Module):
    """An activation that every rank holds enters between the projections: one key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 6), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, 6)).transpose(1, 2)
        key = self.key(x).tanh().unsqueeze(1)
        return self.out((q * key).softmax(-1).transpose(1, 2).flatten(2))[:, 0]


class Stack(nn.Module):
    """Two blocks; `skip` reads what the first gave once more after the last."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        last = self.blocks[1](first)
        return self.head((last + first if self.skip else last).mean(1))
