"""Terms that change how every rank computes, without cutting anything: recomputation, precision, offload,
accumulation.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.strategy.terms.arguments import choice, integer
from shoal.strategy.terms.numerals import counted
from shoal.strategy.terms.term import Promise, Term


class ModifierTerm(Term):
    """A factor without a size."""

    family = "modifier"
    where = "each device"
    repeats: ClassVar[bool] = False
    """Whether the modifier may stand several times, with different arguments."""


class recompute(ModifierTerm):
    """Activations are thrown away in the forward pass and computed again in the backward pass."""

    kind: str = choice("selective", "full")

    title = "activation recomputation"

    def words(self) -> str:
        if self.kind == "full":
            return "only the input of each block is kept; the block is computed again when its gradient is due"
        return (
            "what is large and cheap (attention, normalisation) is computed again when its gradient is "
            "due; the rest is kept"
        )


class amp(ModifierTerm):
    """Arithmetic in 16 bits, with weights and optimiser state in 32."""

    dtype: str = choice("bf16", "fp16")

    title = "mixed precision"

    def words(self) -> str:
        scale = "" if self.dtype == "bf16" else "; the loss is scaled so that small gradients do not vanish"
        return f"matrices are multiplied in {self.dtype}; weights and optimiser state stay in float32{scale}"

    def promises(self) -> tuple[Promise, ...]:
        band = "loss within 5% of the float32 run"
        return (Promise("statistical", f'amp("{self.dtype}") computes in 16 bits', band=band),)


class offload(ModifierTerm):
    """State that is not in use waits in the memory of the host. May stand once for each kind of state."""

    what: str = choice("optimizer", "gradients", "parameters", "activations")

    title = "offload to host memory"
    repeats = True

    def words(self) -> str:
        return {
            "optimizer": "optimiser state lives in host memory, and the step is taken there",
            "gradients": "gradients move to host memory as soon as they are reduced",
            "parameters": "parameters wait in host memory and come to the device block by block",
            "activations": "activations wait in host memory between the forward and the backward pass",
        }[self.what]


class accumulate(ModifierTerm):
    """Gradients of k micro-batches are added up before a step."""

    k: int = integer(1)

    title = "gradient accumulation"

    def words(self) -> str:
        return f"the gradients of {counted(self.k, 'micro-batch', 'micro-batches')} are added up before each step"
