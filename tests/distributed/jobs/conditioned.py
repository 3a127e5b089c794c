"""Jobs whose numbers depend strongly on the order of sums: what a tolerance has to be measured for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.job import Job, from_transformers
from shoal.job.tasks.language import language


class Adapted(nn.Module):
    """LoRA: a frozen layer and a product of two small ones, the second of which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.lora_B(self.lora_A(x))


def _adapted(build: Any) -> nn.Module:
    model = build().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child.out_features != 256:
                setattr(module, name, Adapted(child))
    return model


def lora() -> Job:
    from dataclasses import replace

    job = language("tiny", global_batch=8)
    return replace(job, model=partial(_adapted, job.model), optimizer=partial(torch.optim.AdamW, lr=1e-3))


def qwen() -> Job:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=64,
    )
    return from_transformers(config, sequence=32, global_batch=8)
