"""Hugging Face models of tiny configuration that write attention out themselves: a soft cap, alibi, padding of BERT."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import BertConfig, BloomConfig, Gemma2Config, GPT2Config, MptConfig

from shoal.job import Job, from_transformers

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def _job(config: Any) -> Job:
    config._attn_implementation = "eager"
    job = from_transformers(config, sequence=12, global_batch=4, dropout=0.0)
    return replace(job, optimizer=partial(torch.optim.SGD, lr=0.1))


def gemma2() -> Job:
    return _job(Gemma2Config(**SMALL, vocab_size=256, head_dim=8, num_key_value_heads=1, sliding_window=4))


def bloom() -> Job:
    return _job(BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=256))


def bert() -> Job:
    return _job(BertConfig(**SMALL, vocab_size=256, max_position_embeddings=16))


def mpt() -> Job:
    return _job(MptConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=256, max_seq_len=16))


def gpt2() -> Job:
    return _job(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=256, n_positions=16, bos_token_id=0))
