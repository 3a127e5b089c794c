"""What comes before the two runs of a proof: whether this strategy can train this job, what it promises, and whether
batches may be split as it does."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from shoal.job.facts import build_without_memory
from shoal.layout.layout import facts_of, layout_of
from shoal.proof.coupling import SamplesCoupled, couples_samples, refusal
from shoal.proof.later_layout import require_same_layout_later
from shoal.proof.options import ProofOptions
from shoal.proof.resumable import follow_samples, require_state_averaged, require_state_in_pieces
from shoal.proof.runs import by_timing, unflushed_ranks
from shoal.proof.served import replays_pushes
from shoal.runtime.compiled import compiled_parts, running_eagerly
from shoal.runtime.setup import job_from, try_job
from shoal.strategy import Strategy, contract, dp, none, parse, ps, require_legal

FILLS = 8
"""How many times over a pipeline without flush is filled, at least, before its loss curve is judged."""


@running_eagerly()
def examined(options: ProofOptions) -> dict[str, Any]:
    """How the proof has to be made, and what its certificate reports about the job.

    Raises:
        IllegalStrategy: The strategy cannot train this job.
        SamplesCoupled: It splits batches whose samples depend on each other; the text says how.
    """
    job, strategy = job_from(options), parse(options.strategy)
    try_job(job, strategy)
    layout = layout_of(job, strategy)
    facts = facts_of(job, layout)
    require_legal(strategy, facts=facts)
    require_state_in_pieces(job, strategy, layout.chain)
    require_state_averaged(job, strategy)
    require_same_layout_later(job, strategy)
    # Islands that step by themselves are simulated in one process, and the simulation is compared to the last digit.
    exact = contract(_synchronous(strategy), facts).kind == "exact"
    found = couples_samples(job, strategy=strategy)
    if refused := refusal(found, strategy):
        raise SamplesCoupled(refused)
    notes = [found.reason] if found.reason else []
    if compiled := compiled_parts(build_without_memory(job)):
        notes.append(f"the model is compiled ({compiled}: torch.compile); both runs executed it uncompiled")
    reversible = found.independent and not found.ordered
    following = follow_samples(job, found.state) if strategy.replicas > 1 else []
    frozen = {name for name, _ in build_without_memory(job).named_parameters()}
    return {
        "job": job.name,
        "seed": job.seed,
        "exact": exact,
        "steps": _enough(options.num_steps, strategy),
        # Where samples may depend on each other, their order may mean something.
        "reverse": bool(reversible and not found.state and job.loss_over == "samples"),
        "contract": asdict(contract(strategy, replace(facts, forward_state=tuple(found.state)))),
        "notes": notes,
        "by_timing": by_timing(strategy),
        "undeclared": [name for name in following if name not in frozen and job.buffers is None],
        "frozen": [name for name in following if name in frozen],
    }


def _enough(steps: int, strategy: Strategy) -> int:
    """As many steps as it takes for islands to be averaged, and for staleness to show."""
    periods = [level.sync.period for level in strategy.dp_levels if level.sync.period is not None]
    once = (period + 1 for period in periods)
    return max(steps, *once, -(-FILLS * unflushed_ranks(strategy) // strategy.micro_batches))


def _synchronous(strategy: Strategy) -> Strategy:
    """The strategy with replicas that step together in place of those that are averaged."""
    for level in strategy.dp_levels:
        if isinstance(level.via, ps):
            # A log of updates is replayed with the codec, where each worker is one rank.
            compress = none() if replays_pushes(strategy) else level.compress
            strategy = strategy.replace(level, dp(level.n, compress=compress))
        elif level.sync.period is not None:
            strategy = strategy.replace(level, dp(level.n, compress=level.compress))
    return strategy
