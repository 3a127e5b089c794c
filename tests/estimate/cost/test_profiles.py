"""Which profile a framework's name stands for, and what the age of device and model changes."""

from __future__ import annotations

import pytest

from shoal.estimate.cost import PROFILES, profile_for


@pytest.mark.parametrize(
    ("framework", "device", "precision", "found"),
    [
        ("nanotron", "H100", "bf16", "nanotron"),
        ("Megatron-LM", "A100", "fp16", "megatron-2021"),
        ("Megatron-LM", "A100", "bf16", "megatron"),
        ("Megatron-Core r0.8.0", "A100", "fp16", "megatron"),
        ("Megatron-LM (zero-bubble fork)", "A100", "fp16", "megatron-ahead"),
        ("Fold3D", "A100", "bf16", "megatron"),
        ("NeMo 24.12", "H100", "fp8", "nemo"),
        ("Megatron-Bridge", "GB200", "bf16", "nemo"),
        ("Megatron-DeepSpeed", "A100", "bf16", "megatron-deepspeed-bf16"),
        ("Megatron DeepSpeed", "MI250X", "bf16", "megatron-deepspeed-fused-bf16"),
        ("GPT-NeoX", "A100", "fp16", "megatron-deepspeed"),
        ("DeepSpeed ZeRO-3", "A100", "fp16", "deepspeed-2021"),
        ("DeepSpeed ZeRO-3", "H100", "bf16", "deepspeed"),
        ("PyTorch FSDP", "A100", "fp16", "eager"),
        ("HF Accelerate", "H100", "bf16", "eager"),
        ("llm-foundry FSDP DEFAULT", "H100", "fp8", "mosaic"),
        ("torchtitan compile float8 async-tp", "H100", "fp8", "torchtitan-compiled-async-tp"),
        ("torchtitan ZBVZeroBubble", "H100", "bf16", "torchtitan"),
        ("MaxText", "H100", "bf16", "xla"),
        ("InternEvo", "A100", "bf16", "usual"),
        ("", "A100", "bf16", "usual"),
        ("torchtitan", "V100 SXM2 32GB", "fp16", "torchtitan-unfused"),
    ],
)
def test_names_lead_to_families(framework: str, device: str, precision: str, found: str) -> None:
    assert profile_for(framework, device=device, precision=precision).name == found


def test_a_young_model_has_fused_attention_where_the_device_allows_it() -> None:
    assert profile_for("Megatron-LM", device="A100", precision="fp16", young=True).flash == 1
    assert profile_for("Megatron-DeepSpeed", device="A100", precision="fp16", young=True).flash == 1
    assert profile_for("Megatron-LM", device="V100 SXM2 32GB", precision="fp16", young=True).flash == 0


def test_names_are_unique_and_lead_back() -> None:
    assert all(PROFILES[name].name == name for name in PROFILES)
