"""Small language models whose optimisers look at full parameters, or at some of them: tied and untied, with parameters
that some steps do not use, and experts."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from distributed.jobs.plain import moe as moe_task
from distributed.jobs.uneven import SEQUENCE
from distributed.jobs.uneven import language as language_task
from distributed.optimizer_zoo import Shampoo
from shoal.job import LAMB, LARS, Job, MuonWithAdamW
from shoal.job.models.gpt import GPT, GPTConfig

NEW_LINE = 10
CONFIG = GPTConfig(layers=2, heads=6, hidden=24, sequence=SEQUENCE, vocab=257)


class SometimesUnused(nn.Module):
    """A language model that scales its logits in samples that begin with a new line: in some batches none does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(CONFIG)
        self.mixing = nn.Parameter(torch.eye(7))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x)
        used = x[:, 0] == NEW_LINE
        if bool(used.any()):
            found = found * (1 + used[:, None, None] * self.scale * self.mixing.sum())
        return found


def hidden_matrices(name: str, param: Tensor) -> dict[str, Any]:
    return {"muon": True, "lr": 0.01} if param.dim() == 2 and "blocks" in name else {"weight_decay": 0.05}


def _language(optimizer: Any, *, tied: bool = False, **changes: Any) -> Job:
    changes = {"options": lambda name, param: {}} | changes
    return replace(language_task(), model=partial(GPT, replace(CONFIG, tied=tied)), optimizer=optimizer, **changes)


def muon() -> Job:
    return _language(partial(MuonWithAdamW, lr=3e-3), tied=True, options=hidden_matrices)


def lars() -> Job:
    return _language(partial(LARS, lr=1.0, trust=0.02, weight_decay=0.01))


def lamb() -> Job:
    return _language(partial(LAMB, lr=1e-2, weight_decay=0.01), tied=True)


def shampoo() -> Job:
    return _language(Shampoo)


def adafactor() -> Job:
    return _language(partial(torch.optim.Adafactor, lr=1e-2), tied=True)


def unused() -> Job:
    return replace(_language(partial(LAMB, lr=1e-2)), model=SometimesUnused)


def moe() -> Job:
    return replace(moe_task(), optimizer=partial(LAMB, lr=1e-2), options=lambda name, param: {})
