"""`Transformer`: the shape of a language or vision transformer, which is all that its estimated cost depends on.

No torch: a plan for a preset shape must answer at once. A traced model has a `Layout` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """Blocks of attention and a feed-forward part (or experts), an embedding and a head."""

    name: str = "transformer"
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    ffn: int = 0
    """Width of the feed-forward part, of one expert if there are experts; 0: four times `hidden`."""
    gated: bool = False
    """Three matrices (SwiGLU) instead of two."""
    vocab: int = 50_257
    """Rows of the embedding; classes, for a vision transformer."""
    tied: bool = True
    """Whether the head is the embedding."""
    experts: int = 0
    active_experts: int = 0
    sequence: int = 2048
    causal: bool = True

    def __post_init__(self) -> None:
        defaults = {
            "kv_heads": self.kv_heads or self.heads,
            "ffn": self.ffn or 4 * self.hidden,
            "active_experts": self.active_experts or (1 if self.experts else 0),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of {self.name!r} is {getattr(self, name)}; expected at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"{self.name!r}: {self.heads} heads do not divide hidden {self.hidden}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name!r}: {self.kv_heads} kv_heads do not divide {self.heads} heads")
        if self.active_experts > self.experts:
            raise ValueError(f"{self.name!r}: {self.active_experts} of {self.experts} experts cannot be active")

    @property
    def head_width(self) -> int:
        """Numbers in one head's query."""
        return self.hidden // self.heads

    @property
    def attention_parameters(self) -> int:
        """Weights of one block's four projections."""
        return 2 * self.hidden * (self.hidden + self.kv_heads * self.head_width)

    @property
    def expert_parameters(self) -> int:
        """Weights of one feed-forward part, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """All weights, norms and biases left out (less than a thousandth)."""
        router = self.hidden * self.experts
        block = self.attention_parameters + max(1, self.experts) * self.expert_parameters + router
        return self.layers * block + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def active_parameters(self) -> int:
        """Weights that are used for one token."""
        idle = max(0, self.experts - self.active_experts) * self.expert_parameters
        return self.parameters - self.layers * idle

    def at(self, *, sequence: int) -> Transformer:
        """The same model on sequences of another length."""
        return replace(self, sequence=sequence)
