"""Models of the transformers library, cut by plans written by hand: their own code, dataclasses and loss helpers."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.layout.cuts import Cut
from shoal.layout.tensor.plan import Region, TensorPlan, Vocabulary


def gpt2() -> nn.Module:
    """Tied head, projections of [inputs, outputs], query, key and value in one of them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=67,
            n_positions=16,
            n_embd=24,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
            use_cache=False,
        )
    )


def gpt2_plan() -> TensorPlan:
    regions = []
    for n in range(2):
        attention, mlp = f"transformer.h.{n}.attn", f"transformer.h.{n}.mlp"
        regions.append(
            Region(
                kind="heads",
                parts=4,
                columns=(f"{attention}.c_attn",),
                rows=(f"{attention}.c_proj",),
                cuts={
                    f"{attention}.c_attn.weight": Cut(1, (24,) * 3),
                    f"{attention}.c_attn.bias": Cut(0, (24,) * 3),
                    f"{attention}.c_proj.weight": Cut(0, (24,)),
                },
                scaled=((attention, "split_size"),),
                entry=attention,
            )
        )
        regions.append(
            Region(
                kind="features",
                parts=96,
                columns=(f"{mlp}.c_fc",),
                rows=(f"{mlp}.c_proj",),
                entry=mlp,
                cuts={
                    f"{mlp}.c_fc.weight": Cut(1, (96,)),
                    f"{mlp}.c_fc.bias": Cut(0, (96,)),
                    f"{mlp}.c_proj.weight": Cut(0, (96,)),
                },
            )
        )
    words = Vocabulary(
        embeddings=("transformer.wte",),
        heads=("lm_head",),
        loss_parallel=True,
        cuts={"transformer.wte.weight": Cut(0, (67,)), "lm_head.weight": Cut(0, (67,))},
    )
    return TensorPlan(regions=tuple(regions), vocabulary=words, sequence_dim=1)


def qwen3() -> nn.Module:
    """Grouped-query heads, each normalised: whole weights among cut values."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=67,
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=False,
            initializer_range=0.2,
            use_cache=False,
        )
    )


def qwen3_plan() -> TensorPlan:
    regions = []
    for n in range(2):
        attention, mlp = f"model.layers.{n}.self_attn", f"model.layers.{n}.mlp"
        sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
        cuts = {f"{attention}.{name}.weight": Cut(0, (size,)) for name, size in sizes.items()}
        regions.append(
            Region(
                kind="heads",
                parts=2,
                columns=tuple(f"{attention}.{name}" for name in sizes),
                rows=(f"{attention}.o_proj",),
                cuts={**cuts, f"{attention}.o_proj.weight": Cut(1, (32,))},
                entry=attention,
            )
        )
        regions.append(
            Region(
                kind="features",
                parts=48,
                columns=(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                rows=(f"{mlp}.down_proj",),
                cuts={
                    f"{mlp}.gate_proj.weight": Cut(0, (48,)),
                    f"{mlp}.up_proj.weight": Cut(0, (48,)),
                    f"{mlp}.down_proj.weight": Cut(1, (48,)),
                },
                entry=mlp,
            )
        )
    words = Vocabulary(
        embeddings=("model.embed_tokens",),
        heads=("lm_head",),
        loss_parallel=True,
        cuts={"model.embed_tokens.weight": Cut(0, (67,)), "lm_head.weight": Cut(0, (67,))},
    )
    return TensorPlan(regions=tuple(regions), vocabulary=words, sequence_dim=1)


FAMILIES: dict[str, tuple[Any, Any]] = {"gpt2": (gpt2, gpt2_plan), "qwen3": (qwen3, qwen3_plan)}
