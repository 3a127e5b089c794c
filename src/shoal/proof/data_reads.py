"""Whether a job's data are the same whenever they are read: in one process twice, and on every rank.

Ranks of pp, tp and cp read the same samples, a resumed run reads them again, and a check compares two runs on them.
Augmentation that draws from a global generator, or data made from unseeded random numbers, breaks all three.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.job import Job

SAMPLES = 4

PURE = (
    "Data.batch must be a pure function of the indices: draw augmentations from a generator seeded by the index "
    "(and store, or seed, what is made when the job is loaded)"
)


def reads_differ(job: Job) -> str:
    """How two reads of the same samples differ; empty if they are equal."""
    indices = job.order().indices(0)[:SAMPLES]
    for index in indices:
        one, two = (job.train.batch(indices[indices == index][:1]) for _ in range(2))
        for name in sorted(one.keys() | two.keys()):
            if not same_values(one.get(name), two.get(name)):
                return f"two reads of sample {int(index)} differ in its entry {name!r}; {PURE}"
    return ""


def why_data_differ(digests: Sequence[str]) -> str:
    """Which ranks read other values for the same samples; empty if none do. `digests`: of the same batch, by rank."""
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return ""
    return f"rank {other} reads other values than rank 0 for the same samples; {PURE}"


def same_values(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    """Whether two tensors are of one type and shape and hold the same; not-a-numbers are equal."""
    if one is None or two is None:
        return False
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return bool(((one == two) | ((one != one) & (two != two))).all())
