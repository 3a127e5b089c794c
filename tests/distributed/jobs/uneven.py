"""The built-in tasks and Hugging Face families at sizes that divide by 2, 3 and 4, with targets that are not counted.

Twelve samples of 24 tokens make a batch, and about a third of the targets is ignored, so that ranks and micro-batches
carry unequal numbers of tokens (or, of classifiers, of samples).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.job import Job
from shoal.job.data.text import TextData, standard_library
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.tasks.image import image as image_task
from shoal.job.tasks.language import language as language_task

BATCH, SEQUENCE, IGNORED = 12, 24, -100
SMALL = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 12, "vocab_size": 128}
TEXT = {**SMALL, "intermediate_size": 24, "max_position_embeddings": 32}


class SomeIgnored:
    """Data of which some samples' targets are not counted."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        batch = dict(self.data.batch(indices))
        ignored = torch.from_numpy(np.asarray(indices, dtype=np.int64) * 2654435761 % 1000 < 300)
        batch["y"] = batch["y"].masked_fill(ignored, IGNORED)
        return batch


def language() -> Job:
    config = GPTConfig(layers=4, heads=12, hidden=48, sequence=SEQUENCE)
    text = TextData(standard_library("train"), sequence=SEQUENCE, ignore_fraction=0.3)
    job = language_task("tiny", global_batch=BATCH)
    return replace(job, model=partial(GPT, config), train=text, validation=None)


def image(model: str = "vgg") -> Job:
    job = image_task(model, "tiny", global_batch=BATCH, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    return replace(job, train=SomeIgnored(job.train), validation=None)


def resnet() -> Job:
    return image("resnet")


def _text(name: str, config: Any) -> Job:
    from shoal.job.huggingface import from_transformers

    text = TextData(standard_library("train"), sequence=SEQUENCE, ignore_fraction=0.3, vocab=128)
    return from_transformers(config, data=text, global_batch=BATCH, lr=1e-2, steps=100, dropout=0.0, name=name)


def _classifier(name: str, config: Any, **options: Any) -> Job:
    from shoal.job.huggingface import from_transformers

    job = from_transformers(config, global_batch=BATCH, lr=1e-2, steps=100, dropout=0.0, name=name, **options)
    return replace(job, train=SomeIgnored(job.train), validation=None)


def llama() -> Job:
    from transformers import LlamaConfig

    # Twelve heads of keys for twenty-four of queries: grouped, and still divisible.
    settings = {**TEXT, "num_attention_heads": 24, "num_key_value_heads": 12, "intermediate_size": 36}
    return _text("llama", LlamaConfig(**settings))


def llama_tied() -> Job:
    from transformers import LlamaConfig

    return _text("llama-tied", LlamaConfig(**TEXT, num_key_value_heads=12, tie_word_embeddings=True))


def gpt2() -> Job:
    from transformers import GPT2Config

    return _text("gpt2", GPT2Config(n_embd=48, n_layer=4, n_head=12, vocab_size=128, n_positions=32, n_inner=24))


def qwen2() -> Job:
    from transformers import Qwen2Config

    return _text("qwen2", Qwen2Config(**TEXT, num_key_value_heads=12))


def opt() -> Job:
    from transformers import OPTConfig

    config = OPTConfig(**SMALL, ffn_dim=24, max_position_embeddings=32, word_embed_proj_dim=48)
    return _text("opt", config)


def mixtral() -> Job:
    from transformers import MixtralConfig

    settings = {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 12}
    return _text("mixtral", MixtralConfig(**settings, num_local_experts=12, num_experts_per_tok=2))


def bert() -> Job:
    from transformers import BertConfig

    return _classifier("bert", BertConfig(**TEXT), sequence=SEQUENCE)


def vit() -> Job:
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=12,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        num_channels=1,
    )
    return _classifier("vit", config)


def language_tied() -> Job:
    config = GPTConfig(layers=2, heads=12, hidden=48, sequence=SEQUENCE, tied=True)
    return replace(language(), name="language-tied", model=partial(GPT, config))


def language_unclipped() -> Job:
    """Tied, and not clipped: a wrong gradient stays where it is, and does not shrink all the others by its norm."""
    return replace(language_tied(), clip=None)
