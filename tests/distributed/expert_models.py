"""Models with experts for the tests of expert parallelism: written by hand, awkward on purpose, and a library's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from distributed.jobs import moe, moe_layers

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _library(name: str, implementation: str = "eager", **changes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, name)(**{**SMALL, **changes})
    config._experts_implementation = implementation
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config)


LANGUAGE = {
    "by_hand": lambda: moe.by_hand().model(),
    "six": lambda: moe.six().model(),
    "capacity": lambda: moe.capacity().model(),
    "soft": lambda: moe.soft().model(),
    "mixtral": lambda: _library("MixtralConfig"),
    "mixtral batched": lambda: _library("MixtralConfig", "batched_mm"),
    "mixtral grouped": lambda: _library("MixtralConfig", "grouped_mm"),
    "qwen3": lambda: _library("Qwen3MoeConfig"),
    "gpt_oss": lambda: _library("GptOssConfig"),
    "switch": lambda: _switch(),
}
LAYERS = {
    "awkward": moe_layers.Awkward,
    "pairs": moe_layers.Pairs,
    "stacked": moe_layers.Stacked,
    "drawing": moe_layers.Drawing,
    "weights apart": partial(moe_layers.Stacked, weights=torch.float32),
}


class _Encoder(nn.Module):
    """The library's encoder alone, as a model from tokens to vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids=tokens).last_hidden_state


def _switch() -> nn.Module:
    import transformers

    config = transformers.SwitchTransformersConfig(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=12,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_heads=2,
        num_experts=4,
        expert_capacity=3,
        dropout_rate=0.0,
    )
    model = transformers.SwitchTransformersEncoderModel(config).encoder
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.dtype = torch.float64  # the configuration knows no such type for routers
    return _Encoder(model)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = LANGUAGE[name]() if name in LANGUAGE else LAYERS[name]()
    with torch.no_grad():
        for param in model.parameters():
            # Some libraries start their routers at zero, where every choice is a tie.
            param.add_(0.3 * torch.randn(param.shape))
    return model.double().train()


def tokens_of(name: str, rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if name in LANGUAGE:
        return torch.randint(3, 11, (rows, 5), generator=generator)
    return torch.randn(3 * rows, moe_layers.WIDTH, generator=generator, dtype=torch.float64)
