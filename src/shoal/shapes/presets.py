"""Shapes of known transformers by name: "gpt:175b", "llama3:8b", "mixtral:8x7b", "bert:large", "vit:l".

Taken from the papers and published configurations. A name may be spelled with "-" or ":".
"""

from __future__ import annotations

from shoal.common.suggest import did_you_mean
from shoal.shapes.shape import Transformer


def _gpt3(layers: int, hidden: int, heads: int) -> Transformer:
    """Brown et al. 2020, table 2.1 (vocabulary padded to 51,200 as Megatron-LM does)."""
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=51_200, sequence=2048)


def _gpt2(layers: int, hidden: int, heads: int) -> Transformer:
    """Radford et al. 2019."""
    return Transformer(layers=layers, hidden=hidden, heads=heads, vocab=50_257, sequence=1024)


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, sequence: int, experts: int = 0
) -> Transformer:
    """Touvron et al. 2023, Llama team 2024, Jiang et al. 2024: gated, untied, grouped queries."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        gated=True,
        vocab=vocab,
        tied=False,
        sequence=sequence,
        experts=experts,
        active_experts=2 if experts else 0,
    )


SHAPES: dict[str, Transformer] = {
    "gpt2:small": _gpt2(12, 768, 12),
    "gpt2:medium": _gpt2(24, 1024, 16),
    "gpt2:large": _gpt2(36, 1280, 20),
    "gpt2:xl": _gpt2(48, 1600, 25),
    "gpt:125m": _gpt3(12, 768, 12),
    "gpt:350m": _gpt3(24, 1024, 16),
    "gpt:760m": _gpt3(24, 1536, 16),
    "gpt:1.3b": _gpt3(24, 2048, 16),
    "gpt:2.7b": _gpt3(32, 2560, 32),
    "gpt:6.7b": _gpt3(32, 4096, 32),
    "gpt:13b": _gpt3(40, 5120, 40),
    "gpt:22b": _gpt3(48, 6144, 64),
    "gpt:175b": _gpt3(96, 12_288, 96),
    "gpt:530b": _gpt3(105, 20_480, 128),
    "gpt:1t": _gpt3(128, 25_600, 160),
    "llama:7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 2048),
    "llama:13b": _llama(40, 5120, 40, 40, 13_824, 32_000, 2048),
    "llama:65b": _llama(80, 8192, 64, 64, 22_016, 32_000, 2048),
    "llama2:7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 4096),
    "llama2:13b": _llama(40, 5120, 40, 40, 13_824, 32_000, 4096),
    "llama2:70b": _llama(80, 8192, 64, 8, 28_672, 32_000, 4096),
    "llama3:8b": _llama(32, 4096, 32, 8, 14_336, 128_256, 8192),
    "llama3:70b": _llama(80, 8192, 64, 8, 28_672, 128_256, 8192),
    "llama3:405b": _llama(126, 16_384, 128, 8, 53_248, 128_256, 8192),
    "mixtral:8x7b": _llama(32, 4096, 32, 8, 14_336, 32_000, 4096, experts=8),
    "mixtral:8x22b": _llama(56, 6144, 48, 8, 16_384, 32_768, 4096, experts=8),
    # Devlin et al. 2019.
    "bert:base": Transformer(layers=12, hidden=768, heads=12, vocab=30_522, sequence=512, causal=False),
    "bert:large": Transformer(layers=24, hidden=1024, heads=16, vocab=30_522, sequence=512, causal=False),
    # Dosovitskiy et al. 2021: 196 patches of 16 x 16 and one class token; 1,000 classes.
    "vit:b": Transformer(layers=12, hidden=768, heads=12, vocab=1000, tied=False, sequence=197, causal=False),
    "vit:l": Transformer(layers=24, hidden=1024, heads=16, vocab=1000, tied=False, sequence=197, causal=False),
    "vit:h": Transformer(layers=32, hidden=1280, heads=16, vocab=1000, tied=False, sequence=257, causal=False),
}


def preset(name: str) -> Transformer:
    """A shape by name."""
    key = name.strip().lower()
    for spelling in (key, key.replace("-", ":", 1), key.replace("llama:8b", "llama3:8b")):
        if spelling in SHAPES:
            shape = SHAPES[spelling]
            return shape if shape.name == spelling else _named(shape, spelling)
    raise ValueError(f"no shape is called {name!r}{did_you_mean(key, SHAPES)}; known are {', '.join(SHAPES)}")


def _named(shape: Transformer, name: str) -> Transformer:
    from dataclasses import replace

    return replace(shape, name=name)
