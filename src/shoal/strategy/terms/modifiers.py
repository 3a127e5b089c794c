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
    """Whether the modifier may stand several times, with different first arguments."""


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
    """State that is not in use waits one level below: in host memory, or on disk. May stand once for each kind of
    state.
    """

    what: str = choice("optimizer", "gradients", "parameters", "activations")
    to: str = choice("auto", "host", "disk", default="auto", kw_only=True)
    """The level below. auto: host memory for what devices compute with, disk for what hosts compute with."""

    title = "offload to host memory or disk"
    repeats = True

    def words(self) -> str:
        below = {
            "auto": "one level below (host memory; disk, on a host without devices)",
            "host": "in host memory",
            "disk": "on disk",
        }[self.to]
        return {
            "optimizer": f"optimiser state waits {below} and comes in parts while the step is taken",
            "gradients": f"gradients move {below} as soon as they are reduced",
            "parameters": f"parameters wait {below} and come block by block",
            "activations": f"activations wait {below} between the forward and the backward pass",
        }[self.what]


class accumulate(ModifierTerm):
    """Gradients of k micro-batches are added up before a step."""

    k: int = integer(1)

    title = "gradient accumulation"

    def words(self) -> str:
        return f"the gradients of {counted(self.k, 'micro-batch', 'micro-batches')} are added up before each step"
