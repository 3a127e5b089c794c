"""Learning rates for large batches, and batches that grow.

A rate that was tuned for a base batch b is scaled for a batch B by B/b ("linear", Goyal et al. 2017, for SGD) or by
sqrt(B/b) ("sqrt", Krizhevsky 2014, for Adam: Malladi et al. 2022). A scaled rate is too high for the first steps, so it
is reached gradually: linearly from the base rate over some steps.

Growth raises the batch where a schedule would lower the rate (Smith et al. 2018). It is a function of the sample
counter, as the order of the data is, so that a run resumes at one integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from shoal.job.errors import JobError

ScaleRule = Literal["none", "linear", "sqrt"]
Growth = tuple[tuple[int, int], ...]
"""(sample counter, global batch from there on), ascending."""

EXAMPLE = 'growth takes "samples:batch", separated by commas, such as "2000:48, 6000:96"'


def rate_factor(rule: ScaleRule, *, batch: int, base: int, warmup: int, step: int) -> float:
    """What the learning rate is multiplied by at a step (from 0).

    Example:
        >>> [rate_factor("linear", batch=64, base=16, warmup=3, step=step) for step in range(4)]
        [2.0, 3.0, 4.0, 4.0]
    """
    if rule == "none" or batch == base:
        return 1.0
    factor = batch / base if rule == "linear" else (batch / base) ** 0.5
    return 1.0 + (factor - 1.0) * min(1.0, (step + 1) / warmup) if warmup else factor


def batch_at(growth: Growth, batch: int, counter: int) -> int:
    """The global batch that starts at a sample counter; `batch`: before it grows."""
    return next((size for start, size in reversed(growth) if counter >= start), batch)


def parse_growth(text: str) -> Growth:
    """Growth as the command line has it.

    Example:
        >>> parse_growth("2000:48, 6000:96")
        ((2000, 48), (6000, 96))
    """
    pairs = [part.strip().partition(":") for part in text.split(",")]
    if not all(start.strip().isdecimal() and size.strip().isdecimal() for start, _, size in pairs):
        raise JobError(f"growth is {text!r}; {EXAMPLE}")
    return tuple((int(start), int(size)) for start, _, size in pairs)


def wrong_scale(rule: str, base: int | None, warmup: int, growth: Sequence[Sequence[int]]) -> str:
    """Why these cannot be fields of a job; empty if they can."""
    if rule not in get_args(ScaleRule):
        return f"scale_rule is {rule!r}, but must be 'none', 'linear' or 'sqrt'"
    if base is not None and (type(base) is not int or base < 1):
        return f"base_batch is {base!r}, but must be a whole number of at least 1 (or None: global_batch)"
    if type(warmup) is not int or warmup < 0:
        return f"warmup is {warmup!r}, but must be a whole number of steps"
    starts = [0]
    for pair in growth:
        if len(pair) != 2 or not all(type(number) is int and number > 0 for number in pair) or pair[0] <= starts[-1]:
            return f"growth is {growth!r}, but must be ((samples, batch), ...) with ascending numbers of samples"
        starts.append(pair[0])
    return ""
