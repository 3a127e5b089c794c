"""Causes that a run's record alone does not show: a batch too small for its overheads, activations recomputed though
they fit. Both follow from a probe of the job (`probe.py`).
"""

from __future__ import annotations

import statistics

from shoal.comparison.explaining.evidence import GRADIENTS, Cause, Evidence, ms
from shoal.strategy import recompute

LARGER = 4
"""How many times as large a batch is predicted."""
FITS = 0.8
"""The part of the host's memory that ranks may take together."""


def small_batch(run: Evidence, wait_s: float) -> list[Cause]:
    """What of a step does not grow with its batch: the start of operators, the update, gradients on the wire. A larger
    batch pays for it once for more samples."""
    if run.probed is None or run.strategy is None:
        return []
    one, micro, times = run.probed, run.micro, 1.0
    if (again := run.strategy.term(recompute)) is not None and again.kind == "full":
        times += one.forward_s / max(1e-9, one.fixed_s + one.growing_s)
    cpu_s = statistics.fmean(max(1e-9, each.cpu_s - each.data_s) for each in run.ranks)
    # In a run more is done than by the job alone; what samples cost is the same.
    alone_s = micro * times * (one.fixed_s + one.growing_s) + one.update_s
    growing = min(1.0, micro * times * one.growing_s / max(cpu_s, alone_s))
    own_s = min(min(each.own_s, each.cpu_s) for each in run.ranks)
    nbytes = run.ledger.bytes
    parameters = sum(entry.bytes for key, entry in run.ledger.entries.items() if key.phase in GRADIENTS)
    fixed_s = own_s * (1 - growing) + wait_s * (parameters / nbytes if nbytes else 1.0)
    gain_s = fixed_s * (1 - 1 / LARGER)
    text = (
        f"host overhead, updates and gradients that do not grow with the batch ({ms(fixed_s)} of {ms(run.step_s)}): "
        f"the batch is too small. {LARGER} times as large, the same samples take {1 - gain_s / run.step_s:.0%} of the "
        "time (--batch, with --scale-rule for the learning rate)"
    )
    return [Cause(name="small-batch", text=text, gain_s=gain_s, step_s=run.step_s)]


def unneeded_recompute(run: Evidence) -> list[Cause]:
    """Nothing if the activations would not fit."""
    term = run.strategy.term(recompute) if run.strategy is not None else None
    if term is None or term.kind != "full":
        return []
    gain = max(each.forward_s for each in run.ranks)
    fits = "if the activations fit"
    if run.probed is not None and run.probed.memory_bytes and run.memory_bytes:
        needed = (run.memory_bytes + run.probed.kept_bytes) * len(run.ranks)
        if needed > FITS * run.probed.memory_bytes:
            return []
        fits = (
            f"the activations fit: {run.probed.kept_bytes / 1e6:.3g} MB a rank besides {run.memory_bytes / 1e6:.3g} "
            f"MB, and the host has {run.probed.memory_bytes / 1e9:.3g} GB"
        )
    text = f"computing the forward again ({ms(gain)}); leave {term} out: {fits}"
    return [Cause(name="recompute", text=text, gain_s=gain, step_s=run.step_s)]
