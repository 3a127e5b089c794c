"""What legality and contract need to know of a model and its training, and nothing more.

Every fact may be unknown (None), and a rule that needs an unknown fact does not apply. Whoever has the model
fills in what it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts of a model and of how it is trained; None means unknown."""

    layers: int | None = None
    """Blocks that a pipeline may split into stages."""
    layers_why: str = ""
    """What keeps the model from being cut into more of them, if that is known."""
    tensor_parts: tuple[tuple[str, str, int], ...] | None = None
    """What tensor parallelism may cut, where the model was looked into: (module, what is split, into how many
    parts it can be cut). Empty if nothing can.
    """
    tensor_why: str = ""
    """Why nothing more can be cut by tensor parallelism."""
    sequence_why: str = ""
    """Why the stream between cut layers cannot be cut along the sequence; empty if it can, or is not known."""
    sequence_under_cp_why: str = ""
    """Why it cannot be cut so on ranks that cp has given a part of the sequence."""
    context_why: str = ""
    """Why the sequence cannot be cut for context parallelism; empty if it can, or is not known."""
    context_in_stages_why: str = ""
    """Why it cannot be cut for context parallelism in the stages of a pipeline."""
    spatial_why: str = ""
    """Why image planes cannot be cut; empty if they can, or it is not known."""
    experts_why: str = ""
    """Why what looks like experts cannot be split among ranks."""
    heads: int | None = None
    """Attention heads (of queries)."""
    kv_heads: int | None = None
    """Heads of keys and values, fewer than `heads` under grouped-query attention."""
    hidden: int | None = None
    """Width of the model."""
    vocab: int | None = None
    """Words of the vocabulary; padded where a cut needs it, so no rule refuses it."""
    sequence: int | None = None
    """Tokens in a sample."""
    experts: int | None = None
    """Experts in a mixture; 0 when the model is known to have none."""
    channels: tuple[int, ...] | None = None
    """Output channels of each convolution."""
    image: tuple[int, int] | None = None
    """Height and width of an image."""
    global_batch: int | None = None
    """Samples in one optimiser step, over all ranks."""
    tied: bool | None = None
    """Whether the first and the last layer share a weight."""
    batch_norm: Literal["sync", "local"] | None = None
    """How batch statistics are taken: over all replicas, or by each alone. None if there is no batch norm."""
    dropout: bool | None = None
    """Whether the model draws random masks."""
    clips: bool | None = None
    """Whether gradients are clipped by their global norm."""
    elementwise_optimizer: bool | None = None
    """Whether the optimiser treats every element alone (SGD, Adam), or needs full parameters (LARS, LAMB, Muon)."""
    coupled_optimizer: bool | None = None
    """Whether the optimiser also needs all parameters together (a norm over all of them, Prodigy, LBFGS)."""
    optimizer: str = ""
    """The name of the optimiser's class, for messages."""
    token_weighted: bool | None = None
    """Whether the loss is a mean over tokens, of which samples have different numbers."""
    expert_capacity: bool | None = None
    """Whether experts drop the tokens beyond a capacity."""
    loss_over: Literal["samples", "batch", "micro-batch"] | None = None
    """What the loss is one of: each sample, the global batch, or each part of it that a rank computes at once."""
    forward_state: tuple[str, ...] | None = None
    """Buffers and attributes, batch norm's aside, that a forward changes."""
