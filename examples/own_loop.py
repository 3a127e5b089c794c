"""A training loop of one's own, made parallel by three lines (marked 1, 2, 3).

shoal launch examples/own_loop.py --ranks 2        or        torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
from torch import nn

import shoal

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
engine = shoal.engine(model, "dp(2, zero=1)", optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2))  # 1

inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
labels = inputs[:, :3].argmax(1)


def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(x)


engine.check(loss_of, inputs[:8], labels[:8])  # Optional: may the batch be split?
for epoch in range(20):
    for start in range(0, len(inputs), 64):
        mine = engine.share(64)
        x, y = inputs[start : start + 64][mine], labels[start : start + 64][mine]
        engine.backward(*loss_of(x, y))  # 2, where loss.backward() stood
        result = engine.step()  # 3, where optimizer.step() stood
    if engine.rank == 0 and epoch % 5 == 4:
        print(f"epoch {epoch + 1}: loss {result.loss:.4f}", flush=True)
