"""A small language model whose batch grows from 12 samples to 24 and 36, with a scaled rate that is warmed up."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from distributed.jobs.uneven import SEQUENCE
from distributed.jobs.uneven import language as language_task
from shoal.job import Job
from shoal.job.models.gpt import GPT, GPTConfig


def language() -> Job:
    config = GPTConfig(layers=2, heads=6, hidden=24, sequence=SEQUENCE)
    return replace(
        language_task(),
        name="growing",
        model=partial(GPT, config),
        growth=((24, 24), (70, 36)),
        scale_rule="sqrt",
        base_batch=3,
        warmup=4,
    )
