"""Any Hugging Face language model or classifier as a Job in one line: `from_transformers(LlamaConfig(...))` with random
weights, `from_transformers("folder")` with those of a folder of `save_pretrained`. The data are the
built-in text and images unless others are given. The loss is computed here, as a sum with its count, and
not by the library, whose mean is wrong once a batch is split unevenly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

try:
    import transformers
    from transformers.models.auto import modeling_auto as known
except ImportError as error:
    raise ImportError(
        "from_transformers needs the package transformers; install it: pip install 'shoal[transformers]'"
    ) from error

from shoal.job.data.mnist import ImageData, mnist
from shoal.job.data.text import LabelledTextData, TextData, standard_library
from shoal.job.errors import JobError
from shoal.job.facts import EXPERTS, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, first_number, is_dropout_rate
from shoal.job.groups import DecayMatrices
from shoal.job.job import Batch, Data, Job
from shoal.job.losses import classifier_metrics, cross_entropy, language_metrics, logits_of, perplexity
from shoal.job.pretrained import Kind, Pretrained, build_from, config_of, pretrained_folder
from shoal.job.schedule import WarmupCosine
from shoal.strategy.facts import ModelFacts

Task = Literal["causal-lm", "classifier"]
LONGEST_DEFAULT_SEQUENCE = 128
DEFAULT_IMAGE = 32  # convolutional configurations name no size; theirs halve an image five times


def from_transformers(
    config: Any,
    *,
    new: Sequence[str] = (),
    data: Data | None = None,
    validation: Data | None = None,
    task: Task | None = None,
    sequence: int | None = None,
    global_batch: int = 24,
    lr: float = 1e-3,
    steps: int = 100,
    seed: int = 0,
    clip: float | None = 1.0,
    dropout: float | None = None,
    name: str | None = None,
) -> Job:
    """A job that trains a model of `transformers`: that of a configuration from scratch, or the pretrained one of a
    folder on this machine, as `save_pretrained` writes it (safetensors). Nothing is fetched.

    `new` names tensors that the folder does not have, such as the head of a classifier, by patterns: they start at
    random.
    `task` overrides what the configuration suggests. `dropout` sets every dropout rate of the configuration
    (0.0: a run can then be compared with a serial one to the last digit); None keeps them. `data` yields
    batches with "x" and "y" (next tokens, or classes), or with the library's own "input_ids" / "pixel_values"
    and "labels" (and "attention_mask"); without it the built-in text or images are used.
    """
    folder = None
    if isinstance(config, str | Path):
        folder = pretrained_folder(config)
        config = config_of(folder)
    elif new:
        raise JobError("new names tensors that a folder of weights does not have, but a configuration was given")
    kind = choose_kind(config, task)
    config = _prepared(config, dropout=dropout)
    if data is None:
        sequence = sequence or min(LONGEST_DEFAULT_SEQUENCE, _positions(config))
        data = _built_in(kind, config, "train", sequence=sequence)
        validation = validation or _built_in(kind, config, "validation", sequence=sequence)
    elif sequence is not None:
        raise JobError("sequence was given together with data; the length of the samples is then that of the data")
    entries = set(data.batch(np.arange(min(1, len(data)))))
    causal = kind == "causal-lm"
    return Job(
        name=name or f"transformers:{config.model_type}",
        model=partial(build_from, kind, config) if folder is None else Pretrained(kind, config, folder, new),
        train=data,
        validation=validation,
        inputs=_inputs(kind, entries),
        loss=causal_loss if causal else classifier_loss,
        metrics=_causal_metrics if causal else _classifier_metrics,
        derived={"perplexity": perplexity} if causal else {},
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=0.01),
        options=DecayMatrices(weight_decay=0.01),
        schedule=WarmupCosine(steps=steps, warmup=min(10, steps // 10), floor=0.1),
        clip=clip,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
        facts=_facts(config, kind),
    )


def choose_kind(config: Any, task: Task | None = None) -> Kind:
    """What the configuration is for: by the architecture it names, else by the kinds of model that the
    library has for it.
    """
    model_type = getattr(config, "model_type", None)
    if not isinstance(config, transformers.PretrainedConfig) or not model_type:
        raise JobError(
            "from_transformers needs a configuration such as LlamaConfig(...), or the folder of a pretrained model, "
            f"but got a {type(config).__name__}"
        )
    tables: dict[Kind, Any] = {
        "causal-lm": known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "text-classifier": known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "image-classifier": known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    possible: list[Kind] = [kind for kind, table in tables.items() if model_type in table]
    if task not in (None, "causal-lm", "classifier"):
        raise JobError(f"unknown task {task!r}; the tasks are 'causal-lm' and 'classifier'")
    if task is not None:
        possible = [kind for kind in possible if (kind == "causal-lm") == (task == "causal-lm")]
    else:
        named = set(getattr(config, "architectures", None) or ())
        fitting: list[Kind] = [kind for kind in possible if named & _classes(tables[kind][model_type])]
        possible = fitting or possible
        # Encoders such as BERT can be run as decoders, but mean it only where their configuration says so.
        encoder = model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
        if encoder and "text-classifier" in possible:
            possible = ["text-classifier"]
    if getattr(config, "is_encoder_decoder", False) or not possible:
        wanted = f"a {task}" if task else "a causal language model or a classifier"
        reason = "an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "none of these"
        raise JobError(
            f"{type(config).__name__} cannot become {wanted}: the library has it as {reason}. "
            "Write a job file with the model of your choice."
        )
    return possible[0]


def _classes(entry: str | tuple[str, ...]) -> set[str]:
    return {entry} if isinstance(entry, str) else set(entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Targets:
    """Logits and the targets that they answer, aligned."""

    logits: Tensor
    y: Tensor

    @classmethod
    def of(cls, output: Any, batch: Batch, *, causal: bool) -> _Targets:
        logits = logits_of(output)
        if "y" in batch:
            return cls(logits=logits, y=batch["y"])
        if causal:
            # The library's labels are the tokens themselves; position t answers for token t + 1.
            labels = batch["labels"] if "labels" in batch else batch["input_ids"]
            return cls(logits=logits[:, :-1], y=labels[:, 1:])
        return cls(logits=logits, y=batch["labels"])


def causal_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum over the next tokens, and how many there are."""
    aligned = _Targets.of(output, batch, causal=True)
    return cross_entropy(aligned.logits, {"y": aligned.y})


def classifier_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum over the samples, and how many there are."""
    aligned = _Targets.of(output, batch, causal=False)
    return cross_entropy(aligned.logits, {"y": aligned.y})


def _causal_metrics(output: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    aligned = _Targets.of(output, batch, causal=True)
    return language_metrics(aligned.logits, {"y": aligned.y})


def _classifier_metrics(output: Any, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    aligned = _Targets.of(output, batch, causal=False)
    return classifier_metrics(aligned.logits, {"y": aligned.y})


def _prepared(config: Any, *, dropout: float | None) -> Any:
    """A copy of the configuration for training in float32: the user's own object is left as it is."""
    config = copy.deepcopy(config)
    config.return_dict = True
    config.dtype = torch.float32
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "_experts_implementation", None) is None:
        config._experts_implementation = "eager"  # the fused kernels know no float64, in which runs are compared
    if getattr(config, "pad_token_id", None) is None and first_number(_plain(config), VOCAB):
        config.pad_token_id = (
            config.vocab_size - 1
        )  # classifiers on decoders look for the last token that is not padding
    if dropout is not None:
        for key, value in _plain(config).items():
            if is_dropout_rate(key, value):
                setattr(config, key, dropout)
    return config


def _built_in(kind: Kind, config: Any, split: Literal["train", "validation"], *, sequence: int) -> Data:
    few = None if split == "train" else 192
    if kind == "image-classifier":
        size = getattr(config, "image_size", None) or DEFAULT_IMAGE
        size = size if isinstance(size, int) else max(size)
        images, labels = mnist(split)
        channels = getattr(config, "num_channels", 3)
        return ImageData(images, labels % config.num_labels, size=size, channels=channels, num_samples=few)
    vocab = config.vocab_size
    if kind == "causal-lm":
        return TextData(standard_library(split), sequence=sequence, vocab=vocab, num_samples=few)
    return LabelledTextData(split, sequence=sequence, num_labels=config.num_labels, vocab=vocab, num_samples=few)


def _positions(config: Any) -> int:
    """The longest sample that the configuration's table of positions holds."""
    table = first_number(_plain(config), ("max_position_embeddings", "n_positions")) or LONGEST_DEFAULT_SEQUENCE
    # RoBERTa and its variants number positions from the padding token's id + 1.
    kin = "roberta" in config.model_type or config.model_type in (
        "camembert",
        "mpnet",
        "longformer",
        "data2vec-text",
        "esm",
        "xmod",
    )
    return max(1, table - (config.pad_token_id or 0) - 1) if kin else table


def _inputs(kind: Kind, entries: set[str]) -> dict[str, str]:
    argument = "pixel_values" if kind == "image-classifier" else "input_ids"
    source = argument if argument in entries else "x"
    if source not in entries:
        raise JobError(f"data must yield batches with {argument!r} or 'x', but they hold {sorted(entries)}")
    if "y" not in entries and "labels" not in entries and not (kind == "causal-lm" and source == "input_ids"):
        raise JobError(f"data must yield batches with 'y' or 'labels', but they hold {sorted(entries)}")
    inputs = {argument: source}
    if "attention_mask" in entries:
        inputs["attention_mask"] = "attention_mask"
    return inputs


def _plain(config: Any) -> dict[str, Any]:
    """The configuration as a mapping, under the common names as well as the model's own."""
    common = (*LAYERS, *HEADS, *KV_HEADS, *HIDDEN, *VOCAB, *EXPERTS, "max_position_embeddings")
    renamed = {name: getattr(config, name, None) for name in common}
    return {**config.to_dict(), **{name: value for name, value in renamed.items() if value is not None}}


def _facts(config: Any, kind: Kind) -> ModelFacts:
    settings = _plain(config)
    heads = first_number(settings, HEADS)
    return ModelFacts(
        layers=first_number(settings, LAYERS),
        heads=heads,
        kv_heads=first_number(settings, KV_HEADS) or heads,
        hidden=first_number(settings, HIDDEN),
        vocab=first_number(settings, VOCAB),
        experts=first_number(settings, EXPERTS) or 0,
        tied=bool(settings.get("tie_word_embeddings")) if kind == "causal-lm" else None,
    )
