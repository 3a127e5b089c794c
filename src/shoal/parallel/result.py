"""What a step was, and how it can fail."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.parallel.noise import MeasuredNoise


class CountWithGradient(ValueError):
    """The number by which losses are divided depends on the parameters."""


COUNT_WITH_GRADIENT = (
    "the count requires a gradient: the gradient of sum / count then has a part that comes from the count, which ranks "
    "do not know before backward. Return count.detach() if the weights are constants; otherwise declare "
    'Job(loss_over="batch") and return (sum / count, 1)'
)


@dataclass(frozen=True)
class StepResult:
    """What a step was, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    count: float
    grad_norm: float
    """Before clipping."""
    stop: bool
    """Whether some rank was asked to stop."""
    noise: MeasuredNoise | None = None
    """How noisy the gradient was, where that is measured."""
    skipped: bool = False
    """Whether nothing was updated, since gradients overflowed in fp16."""


NOTHING_COUNTED = "over 0 tokens or samples)"
"""How the reason of a loss ends that was summed over nothing."""


class NonFinite(ArithmeticError):
    """The loss or the gradient is no longer a number; the parameters are those of the last good step."""

    for_user = True

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what + hint)
        self.what = what
        """The message without the hint."""


class LearnsLater(ValueError):
    """A parameter that was frozen when the model was built is not any more."""
