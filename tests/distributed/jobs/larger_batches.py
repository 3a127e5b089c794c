"""Jobs that every axis can cut, with batches of 24: enough for eight replicas, or for four with six micro-batches."""

from __future__ import annotations

from dataclasses import replace

import uneven

from shoal.job import Job


def language() -> Job:
    return replace(uneven.language(), global_batch=24)


def llama_tied() -> Job:
    return replace(uneven.llama_tied(), global_batch=24)


def mixtral() -> Job:
    return replace(uneven.mixtral(), global_batch=24)
