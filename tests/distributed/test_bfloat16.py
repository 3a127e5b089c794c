"""bfloat16, of the model or by autocast: the training is that of a plain loop, and what differs is rounding.

Shoal's gradients are those of the sum of losses, divided by their count after backward. A loop that does so too is met
to the last digits; one that takes the gradient of the mean rounds other numbers, and Adam makes steps of that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData
from shoal.proof.certify import verify
from shoal.training.local import train_job

pytestmark = pytest.mark.processes

WIDTH, HEADS, LENGTH, WORDS, SAMPLES, BATCH, STEPS, SEED = 16, 4, 8, 13, 40, 12, 6, 3


class Block(nn.Module):
    """Queries and keys are normalised in float32, as autocast does it; values are not."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH // HEADS))
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (part * part.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.scale for part in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def data() -> Tensor:
    return torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def job_of(model: Callable[[], nn.Module]) -> Job:
    rows = data()
    return Job(
        name="half",
        model=model,
        train=TensorData(x=rows[:, :-1], y=rows[:, 1:]),
        loss=loss_of,
        global_batch=BATCH,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01),
        steps=STEPS,
        seed=SEED,
    )


def by_hand(model: Callable[[], nn.Module], *, autocast: bool, mean: bool = False, order: int = 0) -> dict[str, Tensor]:
    """The weights of a plain loop. `order`: another order of the samples of each batch."""
    torch.manual_seed(SEED)
    net, rows = model().train(), data()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    seeds = [np.random.SeedSequence([SEED, epoch]) for epoch in (0, 1)]
    epochs = [np.random.Generator(np.random.PCG64(seed)).permutation(SAMPLES) for seed in seeds]
    shuffled = torch.Generator().manual_seed(order)
    for indices in np.concatenate(epochs)[: STEPS * BATCH].reshape(STEPS, BATCH):
        taken = rows[indices[torch.randperm(BATCH, generator=shuffled).numpy()] if order else indices]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total, count = loss_of(net(taken[:, :-1]), {"y": taken[:, 1:]})
        (total / count if mean else total).backward()
        for param in net.parameters() if not mean else ():
            param.grad /= count
        optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


def trained(model: Callable[[], nn.Module], strategy: str, tmp_path: Path) -> dict[str, Tensor]:
    run = train_job(job_of(model), strategy, folder=tmp_path / "run", checkpoint_every=STEPS)
    found: dict[str, Tensor] = run.model().state_dict()
    return found


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights, relative."""
    a, b = (torch.cat([held[name].double().flatten() for name in sorted(held)]) for held in (one, other))
    return float((a - b).norm() / b.norm())


def halved() -> nn.Module:
    return Words().bfloat16()


def test_autocast_is_that_of_a_loop_which_divides_the_gradient_of_the_sum(tmp_path: Path) -> None:
    found, expected = trained(Words, 'amp("bf16")', tmp_path), by_hand(Words, autocast=True)
    assert apart(found, expected) < 1e-6
    assert apart(by_hand(Words, autocast=True, mean=True), expected) > 1e-4  # What only rounding makes of it.


def test_a_model_in_bfloat16_is_that_of_such_a_loop_to_the_bit(tmp_path: Path) -> None:
    found, expected = trained(halved, "serial", tmp_path), by_hand(halved, autocast=False)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [(Words, "dp(2) * amp('bf16')"), (Words, "cp(2) * amp('bf16')"), (halved, "dp(2, zero=2)"), (halved, "tp(2)")],
)
def test_ranks_differ_from_the_loop_by_what_another_order_of_sums_does(
    model: Callable[[], nn.Module], strategy: str, tmp_path: Path
) -> None:
    autocast = "amp" in strategy
    expected = by_hand(model, autocast=autocast)
    # The gradient of the mean rounds in every place, as ranks do; another order of samples in few.
    others: list[dict[str, Any]] = [{"mean": True}, {"order": 1}, {"order": 2}]
    moved = max(apart(by_hand(model, autocast=autocast, **other), expected) for other in others)
    assert apart(trained(model, strategy, tmp_path), expected) < 3 * moved < 0.05


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_across_ranks_takes_what_autocast_gives_it(method: str) -> None:
    proof = verify(job_of(Words), f"cp(2, '{method}') * amp('bf16')", steps=2)
    assert proof.passed, (proof.max_rel_diff, proof.ledger_differences)
    exact = verify(job_of(Words), f"cp(2, '{method}')", steps=2)
    assert exact.passed, (exact.worst, exact.max_rel_diff)
    assert exact.max_rel_diff < 1e-10
