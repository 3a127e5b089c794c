"""What to train: `Job`, the built-in tasks, and the order of the data. Names are imported when they are first
used, so that `shoal.job.names` answers without torch and only `from_transformers` needs transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.job.data.columns import ColumnData
    from shoal.job.data.mnist import ImageData
    from shoal.job.data.sample_cache import SampleCache
    from shoal.job.data.shard_cache import ShardCache
    from shoal.job.data.tar_shards import TarData
    from shoal.job.data.tensors import DatasetData, TensorData
    from shoal.job.data.text import TextData
    from shoal.job.data.token_file import TokenData
    from shoal.job.errors import JobError
    from shoal.job.facts import infer_facts
    from shoal.job.groups import DecayMatrices, no_options, param_groups
    from shoal.job.hints import LayoutHints
    from shoal.job.huggingface import from_transformers
    from shoal.job.job import Batch, Data, Job, Target
    from shoal.job.layerwise import LAMB, LARS, MuonWithAdamW
    from shoal.job.lbfgs import ShardedLBFGS
    from shoal.job.load import load_file, load_job
    from shoal.job.losses import classifier_metrics, cross_entropy, language_metrics, perplexity
    from shoal.job.order import Order, share
    from shoal.job.schedule import StepDecay, WarmupCosine, constant
    from shoal.job.weights.start import start_from

_HOME = {
    "LAMB": "layerwise",
    "LARS": "layerwise",
    "MuonWithAdamW": "layerwise",
    "Batch": "job",
    "ColumnData": "data.columns",
    "Data": "job",
    "DatasetData": "data.tensors",
    "DecayMatrices": "groups",
    "ImageData": "data.mnist",
    "Job": "job",
    "JobError": "errors",
    "LayoutHints": "hints",
    "Order": "order",
    "SampleCache": "data.sample_cache",
    "ShardCache": "data.shard_cache",
    "ShardedLBFGS": "lbfgs",
    "StepDecay": "schedule",
    "TarData": "data.tar_shards",
    "Target": "job",
    "TensorData": "data.tensors",
    "TextData": "data.text",
    "TokenData": "data.token_file",
    "WarmupCosine": "schedule",
    "classifier_metrics": "losses",
    "constant": "schedule",
    "cross_entropy": "losses",
    "from_transformers": "huggingface",
    "infer_facts": "facts",
    "language_metrics": "losses",
    "load_file": "load",
    "load_job": "load",
    "no_options": "groups",
    "param_groups": "groups",
    "perplexity": "losses",
    "share": "order",
    "start_from": "weights.start",
}

__all__ = [
    "LAMB",
    "LARS",
    "Batch",
    "ColumnData",
    "Data",
    "DatasetData",
    "DecayMatrices",
    "ImageData",
    "Job",
    "JobError",
    "LayoutHints",
    "MuonWithAdamW",
    "Order",
    "SampleCache",
    "ShardCache",
    "ShardedLBFGS",
    "StepDecay",
    "TarData",
    "Target",
    "TensorData",
    "TextData",
    "TokenData",
    "WarmupCosine",
    "classifier_metrics",
    "constant",
    "cross_entropy",
    "from_transformers",
    "infer_facts",
    "language_metrics",
    "load_file",
    "load_job",
    "no_options",
    "param_groups",
    "perplexity",
    "share",
    "start_from",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal.job' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.job.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
