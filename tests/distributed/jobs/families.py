"""Tiny configurations of Hugging Face families: models that were written without Shoal, and by nobody here."""

from __future__ import annotations

from typing import Any

import transformers as hf

from shoal.job import Job
from shoal.job.huggingface import from_transformers

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
TEXT = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 64}


def _job(name: str, config: Any, **options: Any) -> Job:
    settings = {"global_batch": 24, "lr": 1e-2, "steps": 100, "dropout": 0.0, **options}
    return from_transformers(config, name=name, **settings)


def llama() -> Job:
    return _job("llama", hf.LlamaConfig(**TEXT, num_key_value_heads=2), sequence=16)


def llama_tied() -> Job:
    return _job("llama-tied", hf.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=True), sequence=16)


def gpt2() -> Job:
    config = hf.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=256, n_positions=64)
    return _job("gpt2", config, sequence=16)


def qwen2() -> Job:
    return _job("qwen2", hf.Qwen2Config(**TEXT, num_key_value_heads=2), sequence=16)


def qwen3() -> Job:
    return _job("qwen3", hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8), sequence=16)


def opt() -> Job:
    config = hf.OPTConfig(**SMALL, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32)
    return _job("opt", config, sequence=16)


def bert() -> Job:
    return _job("bert", hf.BertConfig(**TEXT), sequence=16)


def roberta() -> Job:
    return _job("roberta", hf.RobertaConfig(**TEXT), sequence=16)


def distilbert() -> Job:
    config = hf.DistilBertConfig(dim=32, n_layers=4, n_heads=4, hidden_dim=48, vocab_size=256)
    return _job("distilbert", config, sequence=16)


def mixtral() -> Job:
    config = hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return _job("mixtral", config, sequence=16)


def qwen3_moe() -> Job:
    config = hf.Qwen3MoeConfig(
        **TEXT, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8
    )
    return _job("qwen3-moe", config, sequence=16)


def vit() -> Job:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_channels=1,
    )
    return _job("vit", config)


def mistral() -> Job:
    return _job("mistral", hf.MistralConfig(**TEXT, num_key_value_heads=2), sequence=16)


def gemma() -> Job:
    return _job("gemma", hf.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8), sequence=16)


def phi() -> Job:
    return _job("phi", hf.PhiConfig(**TEXT), sequence=16)


def phi3() -> Job:
    return _job("phi3", hf.Phi3Config(**TEXT, num_key_value_heads=2, pad_token_id=0), sequence=16)


def neox() -> Job:
    return _job("neox", hf.GPTNeoXConfig(**TEXT), sequence=16)


def gptj() -> Job:
    config = hf.GPTJConfig(n_embd=32, n_layer=4, n_head=4, vocab_size=256, n_positions=64, rotary_dim=4)
    return _job("gptj", config, sequence=16)


def bloom() -> Job:
    return _job("bloom", hf.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=256), sequence=16)


def falcon() -> Job:
    return _job("falcon", hf.FalconConfig(**SMALL), sequence=16)


def starcoder2() -> Job:
    return _job("starcoder2", hf.Starcoder2Config(**TEXT, num_key_value_heads=2), sequence=16)


def olmo2() -> Job:
    return _job("olmo2", hf.Olmo2Config(**TEXT, num_key_value_heads=2), sequence=16)


def cohere() -> Job:
    return _job("cohere", hf.CohereConfig(**TEXT, num_key_value_heads=2), sequence=16)


def mamba() -> Job:
    return _job("mamba", hf.MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=256), sequence=16)


def resnet() -> Job:
    config = hf.ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return _job("resnet", config)


def convnext() -> Job:
    config = hf.ConvNextConfig(num_channels=1, hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2)
    return _job("convnext", config)


def gpt2_dropping() -> Job:
    """With dropout where the library puts it: embeddings, attention weights, the residual stream."""
    config = hf.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=256, n_positions=64)
    return _job("gpt2", config, sequence=16, dropout=0.2)


def bert_dropping() -> Job:
    return _job("bert", hf.BertConfig(**TEXT), sequence=16, dropout=0.2)
