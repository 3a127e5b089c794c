"""A job in one file: a small GPT of one's own, on one's own text.

shoal train examples/gpt.py --strategy "dp(2)"
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import DecayMatrices, Job, TextData, WarmupCosine, language_metrics, perplexity

SEQUENCE = 64
STEPS = 200


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    def __init__(self, hidden: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(SEQUENCE, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The SUM over tokens, and how many tokens: Shoal divides by the count of the whole batch, however it was
    cut.
    """
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


# Any text will do. Here: the source of torch's own Module, which is on every machine that can run this.
text = Path(torch.__file__).with_name("nn").joinpath("modules", "module.py").read_bytes()
nine_tenths = len(text) * 9 // 10

job = Job(
    name="gpt",
    model=SmallGPT,
    train=TextData(text[:nine_tenths], sequence=SEQUENCE),
    validation=TextData(text[nine_tenths:], sequence=SEQUENCE),
    loss=loss,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    options=DecayMatrices(weight_decay=0.1),
    schedule=WarmupCosine(steps=STEPS, warmup=20, floor=0.1),
    clip=1.0,
    global_batch=24,
    steps=STEPS,
    metrics=language_metrics,
    derived={"perplexity": perplexity},
    evaluate_every=50,
)
