"""A GPT: pre-norm transformer decoder with learned positions. Written for one device. The number of heads
follows from the projections' width (`unflatten(-1, (-1, head_dim))`), so a projection that holds only some
of the heads computes those correctly.

Shapes: B samples, L positions, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    vocab: int = 256
    sequence: int = 128
    layers: int = 4
    heads: int = 8
    hidden: int = 256
    tied: bool = False
    """Whether the head is the transposed embedding."""
    attention_bias: bool = False
    """Biases on query, key and value, as in GPT-2. The key's bias does not affect the output, so it has no gradient."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden}, which does not divide by heads, {self.heads}")


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden, bias=config.attention_bias)
        self.key = nn.Linear(config.hidden, config.hidden, bias=config.attention_bias)
        self.value = nn.Linear(config.hidden, config.hidden, bias=config.attention_bias)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q_BHL, k_BHL, v_BHL = (
            project(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q_BHL, k_BHL, v_BHL, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BLD), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))


class GPT(nn.Module):
    """Token ids [B, L] to logits [B, L, V]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self._initialise()
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BL: Tensor) -> Tensor:
        length = tokens_BL.size(1)
        if length > self.config.sequence:
            raise ValueError(
                f"the input has {length} positions, but this GPT was built for at most {self.config.sequence}"
            )
        x_BLD = self.tokens(tokens_BL) + self.positions(torch.arange(length, device=tokens_BL.device))
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))

    def _initialise(self) -> None:
        """Normal with deviation 0.02, less for projections into the residual stream (Radford et al. 2019)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
