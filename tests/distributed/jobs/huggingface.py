"""Hugging Face models of tiny configuration: a Llama, a GPT-2 with tied weights, a ViT."""

from __future__ import annotations

from transformers import GPT2Config, LlamaConfig, ViTConfig

from shoal.job import Job, from_transformers

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Job:
    config = LlamaConfig(**SMALL, vocab_size=256, max_position_embeddings=16)
    return from_transformers(config, sequence=16, global_batch=12)


def gpt2() -> Job:
    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=256,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    return from_transformers(config, sequence=16, global_batch=12)


def vit() -> Job:
    config = ViTConfig(**SMALL, image_size=28, patch_size=7, num_channels=1, num_labels=10)
    return from_transformers(config, global_batch=12)
