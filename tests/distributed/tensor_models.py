"""Small models for the tests of tensor parallelism, each with the plan that cuts it written by hand.

None of them knows of parallelism. Sizes divide by 2, 3 and 4 ranks where a test needs it (12 heads or parts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shoal.layout.cuts import Cut
from shoal.layout.tensor.plan import Region, TensorPlan, Vocabulary

WIDTH, HEADS, HEAD, HIDDEN = 24, 12, 4, 48


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its plan, and what it is called on."""

    model: Callable[[], nn.Module]
    plan: TensorPlan
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    extra: dict[str, Any] = field(default_factory=dict)


def linear_cuts(path: str, *, column: bool, size: int, bias: bool = True) -> dict[str, Cut]:
    cuts = {f"{path}.weight": Cut(0 if column else 1, (size,))}
    return {**cuts, f"{path}.bias": Cut(0, (size,))} if column and bias else cuts


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def mlp_region(path: str = "", entry: str | None = None) -> Region:
    up, down = (f"{path}.{name}" if path else name for name in ("up", "down"))
    return Region(
        kind="features",
        parts=HIDDEN,
        columns=(up,),
        rows=(down,),
        entry=entry,
        cuts={**linear_cuts(up, column=True, size=HIDDEN), **linear_cuts(down, column=False, size=HIDDEN)},
    )


class Grouped(nn.Module):
    """Attention as Llama does it: rotary positions, heads of keys and values of their own number, a norm by head."""

    def __init__(self, kv: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, kv
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k, self.v = nn.Linear(WIDTH, kv * HEAD), nn.Linear(WIDTH, kv * HEAD, bias=False)
        self.q_norm = nn.RMSNorm(HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        with torch.no_grad():
            self.q_norm.weight.copy_(torch.rand(HEAD) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q = self.q_norm(self.q(x).view(samples, length, self.num_heads, HEAD)).transpose(1, 2)
        k = self.k(x).view(samples, length, self.num_kv_heads, HEAD).transpose(1, 2)
        v = self.v(x).view(samples, length, self.num_kv_heads, HEAD).transpose(1, 2)
        angle = torch.arange(length, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (z * cos + torch.cat([-z[..., 2:], z[..., :2]], -1) * sin for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(samples, length, self.num_heads * HEAD))


def grouped_query() -> nn.Module:
    """Four heads of keys and values for twelve of queries."""
    return Grouped(4)


def grouped_region(path: str = "", entry: str | None = None, kv: int = 4, listed: bool = False) -> Region:
    at = f"{path}." if path else ""
    cuts = linear_cuts(f"{at}q", column=True, size=HEADS * HEAD, bias=False)
    cuts |= linear_cuts(f"{at}k", column=True, size=kv * HEAD)
    cuts |= linear_cuts(f"{at}v", column=True, size=kv * HEAD, bias=False)
    cuts |= linear_cuts(f"{at}out", column=False, size=HEADS * HEAD)
    return Region(
        kind="heads",
        parts=kv,
        columns=(f"{at}q", f"{at}k", f"{at}v"),
        rows=(f"{at}out",),
        cuts=cuts,
        entry=entry,
        scaled=((path, "num_heads"), (path, "num_kv_heads")),
        partial=(f"{at}q_norm.weight",) if listed else (),
    )


class Settings:
    def __init__(self) -> None:
        self.width, self.heads = HEADS * HEAD, HEADS


class Fused(nn.Module):
    """Query, key and value in one matrix, with the sizes in an object that the whole model shares."""

    def __init__(self, config: Settings | None = None) -> None:
        super().__init__()
        self.config = config or Settings()
        self.qkv = nn.Linear(WIDTH, 3 * self.config.width)
        self.out = nn.Linear(self.config.width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            z.unflatten(-1, (self.config.heads, HEAD)).transpose(1, 2) for z in self.qkv(x).split(self.config.width, -1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def fused_region(path: str = "") -> Region:
    at = f"{path}." if path else ""
    cut = Cut(0, (HEADS * HEAD,) * 3)
    return Region(
        kind="heads",
        parts=HEADS,
        columns=(f"{at}qkv",),
        rows=(f"{at}out",),
        cuts={f"{at}qkv.weight": cut, f"{at}qkv.bias": cut, f"{at}out.weight": Cut(1, (HEADS * HEAD,))},
        scaled=((path, "config.width"), (path, "config.heads")),
    )


class Conv1D(nn.Module):
    """A projection with its weight lying the other way, as GPT-2 has them."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.2), nn.Parameter(torch.randn(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class OwnForward(nn.Linear):
    """A subclass whose forward is its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (x @ self.weight.t() + self.bias) * 2.0


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = OwnForward(WIDTH, HIDDEN), OwnForward(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Planes(nn.Module):
    """Convolution, norm over channels, depthwise convolution, group norm, convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.depthwise = nn.Conv2d(24, 24, 3, padding="same", groups=24, padding_mode="circular")
        self.groups = nn.GroupNorm(12, 24)
        self.second = nn.Conv2d(24, 5, 3, stride=2)
        with torch.no_grad():
            for p in (*self.norm.parameters(), *self.groups.parameters()):
                p.copy_(torch.rand_like(p) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.groups(self.depthwise(F.relu(self.norm(self.first(x)))))))


CHANNELS = Cut(0, (24,))
PLANES = Region(
    kind="channels",
    parts=12,
    columns=("first",),
    rows=("second",),
    cuts={
        **{f"{m}.{p}": CHANNELS for m in ("first", "norm", "depthwise", "groups") for p in ("weight", "bias")},
        "norm.running_mean": CHANNELS,
        "norm.running_var": CHANNELS,
        "second.weight": Cut(1, (24,)),
    },
)


class Block(nn.Module):
    """Pre-norm: the stream is only added to."""

    def __init__(self, attention: Callable[[], nn.Module] = grouped_query) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention(), MLP()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + scale * self.mlp(self.norm2(x))


class PostNorm(Block):
    """The norms lie on the stream, so something after the last row keeps its input."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + scale * self.mlp(x))


class Flat(Block):
    """Flattens samples and positions before its wide layers, as OPT does."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        rows = self.norm2(x).reshape(-1, x.size(-1))
        return x + scale * self.mlp(rows).view(x.shape)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; tied or not, with a vocabulary of any size."""

    def __init__(
        self,
        words: int = 257,
        tied: bool = False,
        block: type[Block] = Block,
        padding: int | None = None,
        attention: Callable[[], nn.Module] = grouped_query,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList(block(attention) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(self.norm(x))


def decoder_plan(
    words: int = 257, *, tied: bool = False, entries: bool = True, loss_parallel: bool = True, listed: bool = False
) -> TensorPlan:
    """Without entries each column gathers for itself; the attention must then not read lengths off its input.
    `listed`: whether the plan says that the norm of each head gets part of its gradient."""
    regions = []
    for n in range(2):
        attention, mlp = f"blocks.{n}.attention", f"blocks.{n}.mlp"
        regions.append(grouped_region(attention, attention, listed=listed) if entries else fused_region(attention))
        regions.append(mlp_region(mlp, mlp if entries else None))
    cut = Cut(0, (words,))
    cuts = {"words.weight": cut, "head.weight": cut} | ({} if tied else {"head.bias": cut})
    vocabulary = Vocabulary(embeddings=("words",), heads=("head",), cuts=cuts, loss_parallel=loss_parallel)
    return TensorPlan(regions=tuple(regions), vocabulary=vocabulary, sequence_dim=1)


class Library(nn.Module):
    """The library's own encoder layers, whichever way round their tensors lie."""

    def __init__(self, batch_first: bool = True, norm_first: bool = False, bias: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            HEADS * 2, HEADS, HIDDEN, dropout=0.0, batch_first=batch_first, norm_first=norm_first, bias=bias
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=masks[0] if masks else None)


def attention_cuts(path: str, width: int, bias: bool = True) -> dict[str, Cut]:
    at = f"{path}." if path else ""
    cuts = {f"{at}in_proj_weight": Cut(0, (width,) * 3), f"{at}out_proj.weight": Cut(1, (width,))}
    return {**cuts, f"{at}in_proj_bias": Cut(0, (width,) * 3)} if bias else cuts


def library_plan(bias: bool = True, sequence_dim: int = 1) -> TensorPlan:
    regions = []
    for n in range(2):
        at = f"encoder.layers.{n}"
        regions.append(
            Region(
                kind="heads",
                parts=HEADS,
                columns=(f"{at}.self_attn",),
                rows=(f"{at}.self_attn.out_proj",),
                cuts=attention_cuts(f"{at}.self_attn", 2 * HEADS, bias),
                entry=f"{at}.self_attn",
                scaled=((f"{at}.self_attn", "num_heads"),),
            )
        )
        up, down = f"{at}.linear1", f"{at}.linear2"
        cuts = linear_cuts(up, column=True, size=HIDDEN, bias=bias) | linear_cuts(down, column=False, size=HIDDEN)
        regions.append(Region(kind="features", parts=HIDDEN, columns=(up,), rows=(down,), cuts=cuts, entry=up))
    return TensorPlan(regions=tuple(regions), sequence_dim=sequence_dim)


class Trick(nn.Module):
    """Convolutions in front of wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.LayerNorm([6, 4, 4])
        self.up, self.down, self.last = nn.Linear(96, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.conv(x))).flatten(1)
        return self.last(F.relu(self.down(F.relu(self.up(x)))))


TRICK = TensorPlan(
    regions=(
        mlp_region(),
        Region(kind="channels", parts=6, columns=("conv",), rows=("conv",), cuts={"conv.weight": Cut(0, (6,))}),
    )
)


class Leaking(nn.Module):
    """Whole values meet cut ones between column and row: no plan may cut this without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(torch.tanh(self.up(x)) * self.gate(x))


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 12, WIDTH, dtype=torch.float64),)


def one_sample() -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 12, WIDTH, dtype=torch.float64),)


def images() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, 8, 8, dtype=torch.float64),)


def plan(*regions: Region, **more: Any) -> TensorPlan:
    return TensorPlan(regions=regions, **more)


CASES: dict[str, Case] = {
    "mlp": Case(model=MLP, plan=plan(mlp_region()), inputs=tokens),
    "heads": Case(model=Grouped, plan=plan(grouped_region(kv=HEADS)), inputs=tokens),
    "grouped": Case(model=grouped_query, plan=plan(grouped_region()), inputs=tokens),
    "fused": Case(model=Fused, plan=plan(fused_region()), inputs=tokens),
    "transposed": Case(
        model=Transposed,
        plan=plan(
            Region(
                kind="features",
                parts=WIDTH,
                columns=("up",),
                rows=("down",),
                cuts={"up.weight": Cut(1, (WIDTH,)), "up.bias": Cut(0, (WIDTH,)), "down.weight": Cut(0, (WIDTH,))},
            )
        ),
        inputs=tokens,
    ),
    "own forward": Case(model=Odd, plan=plan(mlp_region()), inputs=tokens),
    "planes": Case(model=Planes, plan=plan(PLANES), inputs=images),
    "library": Case(model=Library, plan=library_plan(), inputs=tokens),
    "library, length first": Case(
        model=lambda: Library(batch_first=False, norm_first=True, bias=False),
        plan=library_plan(bias=False),
        inputs=tokens,
    ),
}
