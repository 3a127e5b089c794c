"""A layout is inferred from a model as it starts; where its code would be cut otherwise later, axes are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, JobError, TensorData, cross_entropy
from shoal.proof.later_layout import require_same_layout_later
from shoal.strategy import parse

WIDTH, HEADS, LENGTH = 8, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        h = torch.relu(self.up(x))
        return x + self.down(h.softmax(-1) if late else h)


class Model(nn.Module):
    """Counts its calls; from some call on it computes something else. `what`: where."""

    def __init__(self, what: str, *, after: int = 3, calls: bool = True) -> None:
        super().__init__()
        self.what, self.after = what, after
        self.words, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if calls:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        late = False
        if hasattr(self, "calls"):
            self.calls += self.training
            late = bool(self.calls > self.after)
        h = first = self.words(x)
        for block in self.blocks:
            h = block(h, late and self.what == "features")
        if late and self.what == "mean":
            h = h + h.mean(1, keepdim=True)
        return self.head(h + first if late and self.what == "skip" else h)


def job_of(model: Callable[[], nn.Module]) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, LENGTH, WIDTH, generator=generator)
    y = torch.randint(0, WIDTH, (24, LENGTH), generator=generator)
    return Job(
        name="later",
        model=model,
        train=TensorData(x=x, y=y),
        loss=cross_entropy,
        global_batch=8,
        steps=2,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )


@pytest.mark.parametrize(
    ("what", "strategy", "reason"),
    [
        ("features", "tp(2)", "what tp splits would be another one"),
        ("mean", "cp(2)", "how cp cuts the sequence would be another one"),
        ("skip", "pp(2, '1f1b', micro=2)", "what crosses the stages of pp would be another one"),
    ],
)
@pytest.mark.parametrize("after", [3, 600])
def test_code_that_begins_later_and_would_be_cut_otherwise_is_refused(
    what: str, strategy: str, reason: str, after: int
) -> None:
    value = {3: 5, 600: 1000}[after]
    with pytest.raises(JobError, match=f"once calls is {value}, the model computes .* {reason}"):
        require_same_layout_later(job_of(partial(Model, what, after=after)), parse(strategy))


@pytest.mark.parametrize(
    ("what", "strategy"),
    [
        ("nothing", "tp(2) * cp(2)"),
        ("nothing", "pp(2, '1f1b', micro=2)"),
        ("features", "cp(2)"),
        ("mean", "tp(2)"),
        ("skip", "tp(2)"),
        ("mean", "dp(2, zero=3)"),
    ],
)
def test_what_does_not_meet_the_cut_is_no_reason(what: str, strategy: str) -> None:
    require_same_layout_later(job_of(partial(Model, what)), parse(strategy))


def test_a_model_that_counts_nothing_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.proof.later_layout.layout_of", None)
    require_same_layout_later(job_of(partial(Model, "mean", calls=False)), parse("cp(2)"))
