"""What placing random numbers costs: steps of the small GPT with dropout, by the rule and by PyTorch's own generator.

    python benchmarks/dropout.py [--steps 12] [--functional]

Both engines run in one process, a step of one after a step of the other; the figure is the ratio of their median
processor times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import load_job
from shoal.job.draw_places import Places
from shoal.job.models.gpt import GPT, MLP, GPTConfig
from shoal.runtime.setup import Prepared, prepare
from shoal.strategy import parse

RATE = 0.1


class FunctionalMLP(MLP):
    def forward(self, x_BLD: Tensor) -> Tensor:
        return F.dropout(super().forward(x_BLD), RATE, self.training)


def dropping(config: GPTConfig, functional: bool) -> nn.Module:
    model = GPT(config)
    for block in model.blocks:
        if functional:
            block.mlp.__class__ = FunctionalMLP
        else:
            block.attention = nn.Sequential(block.attention, nn.Dropout(RATE))
            block.mlp = nn.Sequential(block.mlp, nn.Dropout(RATE))
    model.tokens = nn.Sequential(model.tokens, nn.Dropout(RATE))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="Steps of each engine.")
    parser.add_argument("--functional", action="store_true", help="Drop by F.dropout inside the MLP's own forward.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = GPTConfig(layers=4, heads=8, hidden=256, sequence=128)
    job = replace(load_job("language", size="small"), model=partial(dropping, config, asked.functional))
    ready: dict[str, Prepared] = {}
    for name in ("placed", "plain"):
        ready[name] = prepare(job, parse("dp(1)"), rank=0, backend=None)
    plain = ready["plain"].runner.randomness
    plain.places = Places()
    for module in ready["plain"].engine.model.modules():
        vars(module).pop("forward", None)
    taken: dict[str, list[float]] = {name: [] for name in ready}
    for step in range(asked.steps + 2):
        for name, one in ready.items():
            start = time.process_time()
            one.runner.step(step, step * job.global_batch)
            taken[name].append(time.process_time() - start)
    medians = {name: statistics.median(times[2:]) for name, times in taken.items()}
    ratios = [a / b for a, b in zip(taken["placed"][2:], taken["plain"][2:], strict=True)]
    print(f"plain {medians['plain'] * 1e3:.1f} ms, placed {medians['placed'] * 1e3:.1f} ms")
    print(f"ratio of medians {medians['placed'] / medians['plain']:.3f}, median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
