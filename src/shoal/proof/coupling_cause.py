"""What is wrong where a batch is not the sum of its parts: the kind of fault, and a sentence with what would work."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

from shoal.proof.sample_pass import TOLERANCE, SamplePass, difference, is_average, outputs_differ, over_count, sum_of

Kind = Literal[
    "none", "mean", "count", "count-gradient", "backward", "coupled", "padding", "data", "random", "unchecked"
]
"""none: samples are independent. mean, count: the loss is no sum, or the count is not what it is a sum over.
count-gradient: the count depends on the parameters. backward: gradients are not proportional to the loss.
coupled: samples see each other in the model or in the loss.
padding: the numbers depend on which samples are read together. data: two reads of the same samples differ.
random: the model draws numbers that are not dropout. unchecked: it could not be computed."""


EIGHTH = 0.125
"""A power of two: linear functions of it round alike."""
ROUNDING = 1e-12
"""Of the largest gradient: what is below it may be rounding, which a backward that takes logarithms does not scale by a
power of two."""


def not_linear(full: SamplePass, part: SamplePass, hooked: Collection[str]) -> str:
    """What is wrong if the gradients of an eighth of the loss (`part`) are not an eighth of its gradients. `hooked`:
    parameters with hooks on their gradients. What is below the rounding of the largest gradient may be rounding."""
    largest = max((float(g.abs().max()) for g in part.gradients.values() if g.numel()), default=0.0)
    for name in (name for name in full.gradients if name in part.gradients and full.gradients[name].numel()):
        one, other = EIGHTH * full.gradients[name], part.gradients[name]
        most = max(TOLERANCE * float(other.abs().max()), ROUNDING * largest)
        if float((one - other).abs().max()) > most:
            hook = "a hook on it, or " if name in hooked else ""
            return (
                f"its backward is not linear: for an eighth of the loss the gradient of {name} is not an eighth of "
                f"what it was ({hook}a backward that clips, normalises or the like). Gradients are those of a sum of "
                "losses, on each rank of its own samples, and are divided by the count in the end; limit them by "
                "Job.clip, or change them in the optimizer's step"
            )
    return ""


def cause(
    full: SamplePass,
    one: SamplePass,
    two: SamplePass,
    *,
    sizes: tuple[int, int],
    cut: Callable[[], SamplePass | None],
) -> tuple[Kind, str]:
    """The kind of fault and its sentence. `cut`: the sum of both parts where they are cut from the batch instead of
    read by themselves; None where that cannot be."""
    first, second = sizes
    of = f"of {first + second} samples it is {{:.6g}}, of {first} and {second} of them {{:.6g}} and {{:.6g}}"
    losses = of.format(full.loss, one.loss, two.loss)
    counts = of.format(full.count, one.count, two.count)
    if difference(full, replace(sum_of(one, two), count=full.count)) <= TOLERANCE:
        return "count", (
            f"the count is wrong: {counts}, which does not add up. Return the number of samples or tokens that the "
            "loss is summed over"
        )
    if is_average(full, one, two):
        return "mean", (
            f'the loss is a mean, not a sum: {losses}. Return (sum, count): reduction="sum" in the loss, and the '
            "number of samples or tokens that it is summed over"
        )
    if is_average(over_count(full), over_count(one), over_count(two)):
        return "count", (
            f"the count is not what the loss is a sum over: divided by its count, {losses} by {full.count:g}, "
            f"{one.count:g} and {two.count:g}, it is another average. Return the sum of the losses and the number of "
            "samples or tokens that it is summed over"
        )
    if (in_place := cut()) is not None and difference(full, in_place) <= TOLERANCE:
        return "padding", (
            "what a sample computes depends on which samples are read with it (padding to the longest, for example); "
            f"the loss does not add up: {losses}. Pad all samples to one length, or mask what is padded in the model "
            "and in the loss"
        )
    if inside := outputs_differ(full.output, one.output, two.output):
        return "coupled", (
            f"the model couples samples ({inside}); the loss does not add up: {losses}. Use nn.BatchNorm for batch "
            "statistics (they are synchronised), a strategy that leaves the batch in one piece (tp, cp, pp with "
            'micro=1), or declare Job(loss_over="micro-batch") if each part of a batch is meant to be a batch of its '
            "own"
        )
    return "coupled", (
        f'the loss couples samples and does not add up: {losses}. Declare Job(loss_over="batch") for a loss over the '
        'global batch (dp gathers the model\'s outputs), or loss_over="micro-batch" if each part of a batch is meant '
        "to have a loss of its own"
    )
