"""What legality needs to know of a job's model: heads, layers, channels, tied weights and so on, read from the
module tree. Declarations in `Job.facts` take precedence. A fact that cannot be read stays None ("unknown"), and
rules about it do not apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from shoal.job.elementwise import probe
from shoal.job.errors import JobError
from shoal.job.job import Job
from shoal.job.losses import IGNORED
from shoal.job.own_code import built
from shoal.job.random_optimizer import without_draws
from shoal.strategy.facts import ModelFacts

# Names for the same quantity: Hugging Face's (GPT-2's and the common ones), torch's, ours.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "hidden_dim", "hidden")
VOCAB = ("vocab_size", "vocab")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "experts")
CAPACITY = ("expert_capacity", "expert_capacity_factor", "capacity_factor")
DROPOUT_WORDS = ("drop", "dropout", "pdrop", "layerdrop")


def infer_facts(job: Job, *, model: nn.Module | None = None) -> ModelFacts:
    """The facts of a job: those it declares, completed by what its model, data and optimiser show.

    Without `model` one is built, on the meta device if its code allows it.
    """
    model = model if model is not None else build_without_memory(job)
    require_initialised(model, job.name)
    tried = probe(without_draws(job.optimizer), model, job.options)
    inferred = {
        **_of_model(model),
        **_of_data(job),
        "global_batch": int(job.global_batch),
        "clips": job.clip is not None,
        "loss_over": job.loss_over,
        "elementwise_optimizer": tried.elementwise,
        "coupled_optimizer": tried.coupled,
        "optimizer": tried.name,
    }
    inferred["batch_norm"] = job.batch_norm if has_batch_norm(model) else None
    declared = _declared(job.facts)
    return ModelFacts(**{**inferred, **declared})


def build_without_memory(job: Job) -> nn.Module:
    """The job's model on the meta device, or a real one if its constructor reads values. The random state is
    restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        try:
            with torch.device("meta"):
                return built(job)
        except Exception:  # If the model is faulty, building the real one reports it.
            return built(job)


def require_initialised(model: nn.Module, name: str) -> None:
    """Refuses a model whose parameters get their shapes from the first batch (nn.LazyLinear)."""
    for path, module in model.named_modules():
        lazy = next((key for key, tensor in module.named_parameters(recurse=False) if is_lazy(tensor)), None)
        if lazy is not None:
            raise JobError(
                f"job {name!r}: {path or 'the model'} ({type(module).__name__}) has a parameter without a shape "
                f"({lazy}), which a first batch would give it; run one batch through the model in the function that "
                "builds it, or name the sizes"
            )


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Whether training draws random masks: a dropout module with a positive rate, or such a rate in a configuration."""
    for module in model.modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
        dropped = getattr(module, "dropout", None)
        if (
            isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
            and isinstance(dropped, (int, float))
            and dropped > 0
        ):
            return True
    settings = settings_of(model)
    return any(is_dropout_rate(key, value) for key, value in settings.items())


def has_tied_parameters(model: nn.Module) -> bool:
    """Whether one parameter occurs in two places of the module tree."""
    every = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return len(every) != len(set(every))


def _of_model(model: nn.Module) -> dict[str, Any]:
    settings = settings_of(model)
    channels = tuple(module.out_channels for module in model.modules() if isinstance(module, _ConvNd))
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = first_number(settings, HEADS) or _attribute(model, HEADS)
    # A vision transformer's patch embedding is a convolution, but what may be split there are heads.
    return {
        "layers": first_number(settings, LAYERS) or _count_layers(model),
        "heads": heads,
        "kv_heads": first_number(settings, KV_HEADS) or _attribute(model, KV_HEADS) or heads,
        "hidden": first_number(settings, HIDDEN) or (embeddings[0].embedding_dim if embeddings else None),
        "vocab": first_number(settings, VOCAB) or (max(e.num_embeddings for e in embeddings) if embeddings else None),
        "experts": first_number(settings, EXPERTS) or _no_experts(model),
        "channels": channels if channels and not heads else None,
        "tied": has_tied_parameters(model),
        "dropout": has_dropout(model),
        "expert_capacity": any(bool(settings.get(name)) for name in CAPACITY),
    }


def _of_data(job: Job) -> dict[str, Any]:
    """The length of a text, the size of an image, and whether samples count unequal numbers of tokens."""
    num = min(16, len(job.train))
    batch = job.train.batch(np.unique(np.linspace(0, len(job.train) - 1, num).astype(np.int64)))
    entries = list(job.inputs.values()) if isinstance(job.inputs, Mapping) else list(job.inputs)
    facts: dict[str, Any] = {}
    for tensor in (batch[entry] for entry in entries if entry in batch):
        if tensor.dim() == 2 and not tensor.is_floating_point() and "sequence" not in facts:
            facts["sequence"] = tensor.size(1)
        if tensor.dim() == 4 and tensor.is_floating_point() and "image" not in facts:
            facts["image"] = (tensor.size(-2), tensor.size(-1))
    targets = [t for name, t in batch.items() if name not in entries and not t.is_floating_point()]
    facts["token_weighted"] = any(bool((target == IGNORED).any()) for target in targets)
    return facts


def settings_of(model: nn.Module) -> dict[str, Any]:
    """The model's `config`, if it carries one, as a plain mapping."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if callable(getattr(config, "to_dict", None)):
        mapped = {
            name: getattr(config, name, None) for name in (*LAYERS, *HEADS, *HIDDEN, *VOCAB)
        }  # honours renamed attributes
        return {**{key: value for key, value in mapped.items() if value is not None}, **config.to_dict()}
    return dict(vars(config)) if hasattr(config, "__dict__") else {}


def first_number(settings: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    values = (settings.get(key) for key in keys)
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0),
        None,
    )


def _attribute(model: nn.Module, names: Iterable[str]) -> int | None:
    """The first module that carries the number itself, as nn.MultiheadAttention carries num_heads."""
    for module in model.modules():
        found = first_number({name: getattr(module, name, None) for name in names}, names)
        if found:
            return found
    return None


def _count_layers(model: nn.Module) -> int | None:
    """The longest list of blocks of one kind; without one, the layers with weights of two or more dimensions."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [len(blocks) for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    if alike:
        return max(alike)
    return sum(isinstance(module, (_ConvNd, nn.Linear)) for module in model.modules()) or None


def _no_experts(model: nn.Module) -> int | None:
    """0 where nothing in the module tree is called an expert; unknown otherwise."""
    return None if any("expert" in name.lower() for name, _ in model.named_modules()) else 0


def is_dropout_rate(key: str, value: Any) -> bool:
    """Whether an entry of a configuration makes training drop something at random."""
    # summary_* belongs to a head that language models carry in their configuration but do not have.
    named = any(part in DROPOUT_WORDS for part in key.split("_")) and not key.startswith("summary_")
    return named and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _declared(facts: ModelFacts | None) -> dict[str, Any]:
    if facts is None:
        return {}
    values = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    return {name: value for name, value in values.items() if value not in (None, "")}
