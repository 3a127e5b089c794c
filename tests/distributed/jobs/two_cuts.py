"""Blocks that attend and blocks that do not in one list, with a loss by position and one of the whole sequence: cp
cuts from the first block that attends to the last, tp from the first that is cut to the last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData

WIDTH, LENGTH = 16, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Single(nn.Module):
    """One projection: no region of tp, but it lies on the stream between those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


KINDS = {"a": Attends, "m": Mlp, "s": Single}


class Net(nn.Module):
    def __init__(self, blocks: str, pooled: bool) -> None:
        super().__init__()
        self.stem, self.head, self.pooled = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), pooled
        self.pool = nn.Linear(LENGTH, 1) if pooled else nn.Identity()  # The order of positions matters.
        self.blocks = nn.ModuleList(KINDS[kind]() for kind in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return self.pool(x.transpose(1, 2)).squeeze(-1) if self.pooled else x


def squared(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    target = batch["y"].mean(1) if output.dim() == 2 else batch["y"]
    return ((output - target) ** 2).sum(), output.numel()


def made(blocks: str, *, pooled: bool) -> Job:
    source = torch.Generator().manual_seed(3)
    data = TensorData(x=torch.randn(32, LENGTH, 4, generator=source), y=torch.randn(32, LENGTH, 3, generator=source))
    return Job(
        name="two-cuts",
        model=lambda: Net(blocks, pooled),
        train=data,
        validation=data,
        loss=squared,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05),
        global_batch=8,
        steps=4,
        clip=None,
    )


mlp_first, mlp_first_pooled = made("ma", pooled=False), made("mam", pooled=True)
mlp_last, mlp_last_pooled = made("am", pooled=False), made("am", pooled=True)
attends, attends_pooled = made("aa", pooled=False), made("aa", pooled=True)
uncut_between = made("assa", pooled=False)
