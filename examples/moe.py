"""A mixture of experts in one file, written as for one machine: each token goes to two of eight experts.

shoal train examples/moe.py --strategy "ep(2)"
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TextData, language_metrics, perplexity

SEQUENCE, HIDDEN, EXPERTS, CHOICES = 64, 64, 8, 2


class Mixture(nn.Module):
    """Shoal finds the list of experts by watching it run, and needs to be told nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, choices = self.router(tokens).softmax(-1).topk(CHOICES)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(choices == number)
            if len(token):
                answer = expert(tokens[token]) * weights[token, slot, None]
                mixed = mixed.index_add(0, token, answer.to(mixed.dtype))
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mixture(self.norm2(x))


class MixtureGPT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


# Any text will do. Here: the source of torch's own Module, which is on every machine that can run this.
text = Path(torch.__file__).with_name("nn").joinpath("modules", "module.py").read_bytes()
nine_tenths = len(text) * 9 // 10

job = Job(
    name="moe",
    model=MixtureGPT,
    train=TextData(text[:nine_tenths], sequence=SEQUENCE),
    validation=TextData(text[nine_tenths:], sequence=SEQUENCE),
    loss=loss,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    clip=1.0,
    global_batch=24,
    steps=200,
    metrics=language_metrics,
    derived={"perplexity": perplexity},
)
