"""The memory that a strategy needs of a rank, without a calibrated machine, and strategies that need less."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.estimate.pipeline.simulate import most_kept
from shoal.estimate.step_calls import step_calls
from shoal.estimate.steps.model import JobModel
from shoal.estimate.steps.price import (
    held_bytes,
    local_operations,
    repeated_operations,
    representatives,
    shards_of,
    states,
)
from shoal.strategy import ModelFacts, Strategy, accumulate, is_legal, pp, recompute
from shoal.strategy.schedule import actions

MICRO = (2, 4, 8, 16)


def memory_split(model: JobModel, strategy: Strategy) -> dict[str, int]:
    """Bytes of parameters, gradients, the optimiser's state and activations of the rank that needs most."""
    again = repeated_operations(model, strategy.term(recompute), local := list(local_operations(model, strategy)))
    ratio = model.global_batch / (strategy.replicas * strategy.micro_batches) / model.samples
    kept = {piece.name: 0.0 for piece in model.pieces} | {"loss": 0.0}
    for number, operation in enumerate(local):
        if number not in again:
            kept[operation.piece] += operation.of_samples(ratio).kept_bytes
    pipeline = strategy.term(pp)
    if pipeline is None:
        activations = sum(kept.values())
    else:
        ranges = model.stages[pipeline.n * pipeline.chunks]
        stages = [sum(kept[piece.name] for piece in model.pieces[a:b]) for a, b in ranges]
        stages[-1] += kept["loss"]
        activations = max(stages) * max(most_kept(order) for order in actions(pipeline))
    ranks = [
        step_calls(model.shapes, model.forward, strategy, global_batch=model.global_batch, rank=rank)
        for rank in representatives(strategy)
    ]
    held = max(held_bytes(each.held) for each in ranks)
    return states(model, strategy, held, shards_of(strategy)) | {"activations": round(activations)}


def smaller(model: JobModel, facts: ModelFacts, strategy: Strategy) -> list[tuple[Strategy, int]]:
    """Strategies of as many ranks that need less, each with its bytes; those that change least come first."""
    now, found = sum(memory_split(model, strategy).values()), []
    seen = {str(strategy)}
    for changed in _changed(strategy):
        if str(changed) in seen or not is_legal(changed, world=strategy.world, facts=facts):
            continue
        seen.add(str(changed))
        needed = sum(memory_split(model, changed).values())
        if needed < now:
            found.append((changed, needed))
    return found


def _changed(strategy: Strategy) -> Iterator[Strategy]:
    """One change, then two."""
    for first in _once(strategy):
        yield first
    for first in _once(strategy):
        yield from _once(first)


def _once(strategy: Strategy) -> Iterator[Strategy]:
    for stage in (1, 2, 3):
        levels = [level for level in strategy.dp_levels if level.n > 1 and level.zero < stage]
        for level in levels[-1:]:
            yield strategy.replace(level, level.replace(zero=stage))
    if strategy.term(recompute) is None:
        yield strategy * recompute("full")
    micro = strategy.term(accumulate)
    if strategy.term(pp) is None:
        for number in MICRO:
            if micro is None:
                yield strategy * accumulate(number)
            elif number > strategy.micro_batches:
                yield strategy.replace(micro, accumulate(number))
    else:
        term = strategy.term(pp)
        assert term is not None
        for number in MICRO:
            if number > term.micro:
                yield strategy.replace(term, term.replace(micro=number))
