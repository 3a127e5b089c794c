"""How many steps a batch saves: a sweep over batch sizes, beside the critical batch that the gradient noise predicts.

    python benchmarks/large_batch.py [--most 4096] [--seeds 2] [--json out.json]

A small classifier (a two-layer network that learns the noisy labels of another one) is trained by SGD to a validation
loss with batches of 8 to 4,096. For each batch the best of several learning rates counts, powers of two around the
linear rule. Three regions show: at first twice the batch takes half the steps, then it saves less and less, at last
nothing. Steps are fitted by smallest * (1 + critical / batch) (McCandlish et al. 2018, equation 2.11), and the critical
batch of that fit is compared with the noise scale that runs measured, the median over their second halves.

Counts of steps do not depend on the machine or its load.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy
from shoal.runtime.setup import prepare
from shoal.strategy import parse
from shoal.training.noise_scale import NoiseScale

INPUTS, HIDDEN, CLASSES, SAMPLES, HELD_OUT = 32, 48, 10, 60_000, 2_000
TARGET = 1.4
BASE_BATCH, BASE_RATE = 8, 0.05
MOST_SAMPLES, MOST_STEPS = 30_000, 40
"""A run that has made so many steps, and seen as many samples, without reaching the target has failed."""


def data() -> tuple[TensorData, TensorData]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES + HELD_OUT, INPUTS, generator=generator)
    first = torch.randn(INPUTS, HIDDEN, generator=generator) / INPUTS**0.5
    second = torch.randn(HIDDEN, CLASSES, generator=generator) * 4 / HIDDEN**0.5
    scores = torch.tanh(2 * x @ first) @ second
    y = torch.multinomial(scores.softmax(1), 1, generator=generator)[:, 0]
    return TensorData(x=x[:SAMPLES], y=y[:SAMPLES]), TensorData(x=x[SAMPLES:], y=y[SAMPLES:])


class Student(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(2 * x)
        return found


def job_of(train: TensorData, held: TensorData) -> Job:
    return Job(
        name="sweep",
        model=Student,
        train=train,
        validation=held,
        loss=cross_entropy,
        global_batch=BASE_BATCH,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=BASE_RATE),
        steps=10**6,
    )


def steps_to_target(job: Job) -> tuple[float, float | None]:
    """Steps until the target (inf: never), and the median critical batch of the second half of them."""
    ready = prepare(job, parse("accumulate(4)"), rank=0, backend=None)
    scale, seen, counter, step = NoiseScale(), [], 0, 0
    every = max(1, 400 // job.global_batch)
    while counter < max(MOST_SAMPLES, MOST_STEPS * job.global_batch):
        try:
            result = ready.runner.step(step, counter)
        except ArithmeticError:
            break
        step, counter = step + 1, ready.runner.order.next(counter)
        scale.add(result.noise, samples_per_count=job.global_batch / result.count)
        seen.append(scale.critical_batch)
        if step % every == 0:
            loss = ready.runner.evaluate()["loss"]
            if loss <= TARGET:
                known = [each for each in seen[len(seen) // 2 :] if each is not None]
                ready.close()
                return step, statistics.median(known) if known else None
            if not loss < 2 * log(CLASSES):
                break
    ready.close()
    return inf, None


def fitted(batches: list[int], steps: list[float]) -> tuple[float, float]:
    """(smallest number of steps, critical batch), least squares in the logarithm of steps."""
    best, found = inf, (0.0, 0.0)
    for critical in np.geomspace(1, 10_000, 400):
        shape = [log(1 + critical / batch) for batch in batches]
        smallest = statistics.fmean(log(s) - f for s, f in zip(steps, shape, strict=True))
        error = sum((log(s) - smallest - f) ** 2 for s, f in zip(steps, shape, strict=True))
        if error < best:
            best, found = error, (exp(smallest), float(critical))
    return found


def region(before: float | None, steps: float) -> str:
    """By what doubling the batch has saved of the steps: half is perfect."""
    if before is None:
        return ""
    saved = before / steps
    return "perfect" if saved > 1.7 else "diminishing" if saved > 1.15 else "none"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--most", type=int, default=4096, help="largest batch")
    asked.add_argument("--seeds", type=int, default=2)
    asked.add_argument("--json", help="where to write the figures")
    given = asked.parse_args()
    torch.set_num_threads(1)
    train, held = data()
    rows: list[dict[str, Any]] = []
    batch, rate, before = BASE_BATCH, 1.0, None
    print(f"{'batch':>6} {'steps':>8} {'samples':>10} {'rate':>7} {'noise scale':>12}  doubling saves")
    while batch <= given.most:
        tried = []
        for factor in (rate, 2 * rate, rate / 2):
            changed = {"global_batch": batch, "optimizer": _sgd(BASE_RATE * factor)}
            found = [steps_to_target(replace(job_of(train, held), seed=seed, **changed)) for seed in range(given.seeds)]
            known = [noise for _, noise in found if noise is not None]
            median = statistics.median(steps for steps, _ in found)
            tried.append((median, factor, statistics.median(known) if known else None))
        steps, rate, noise = min(tried, key=lambda row: row[0])
        rows.append({"batch": batch, "steps": steps, "rate": rate, "critical_batch": noise})
        name = region(before, steps)
        shown = "-" if noise is None else f"{noise:.0f}"
        line = f"{batch:>6} {steps:>8.0f} {steps * batch:>10.0f} {BASE_RATE * rate:>7.3g} {shown:>12}  {name}"
        print(line, flush=True)
        before, batch, rate = steps, 2 * batch, min(2 * rate, 128.0)
    smallest, critical = fitted([row["batch"] for row in rows], [row["steps"] for row in rows])
    predicted = statistics.median(row["critical_batch"] for row in rows if row["critical_batch"] is not None)
    print(f"fit of steps: {smallest:.0f} * (1 + {critical:.0f} / batch); by the gradient noise: {predicted:.0f}")
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": rows, "fitted": critical, "predicted": predicted}, indent=1))


def _sgd(lr: float) -> Any:
    return lambda groups: torch.optim.SGD(groups, lr=lr)


if __name__ == "__main__":
    main()
