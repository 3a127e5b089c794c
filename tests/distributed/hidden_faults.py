"""Traffic that changes no number, planted on purpose: collectives past the ledger, which the engine's own account lacks
too, and gathers that no one needs. The engine's account agrees with the ledger, so that only traffic predicted without
the engine can give them away.
"""

from __future__ import annotations

from typing import Any

import shoal.parallel.expert.shard_experts as shard_experts
import shoal.parallel.tensor.regions as regions
from shoal.comm.ledger import BOOK
from shoal.parallel.context.cut import SequenceCut
from shoal.parallel.pipeline.borders import Borders
from shoal.parallel.zero import ParameterGathering, ShardedUnit
from shoal.proof.entry import parallel_run


def _leave_out(axis: str, *kinds: str) -> None:
    """The ledger misses what happens along an axis."""
    enter = BOOK.enter

    def forgetful(**entry: Any) -> None:
        if entry["axis"] != axis or entry["kind"] not in kinds:
            enter(**entry)

    BOOK.enter = forgetful  # type: ignore[method-assign]


def out_of_regions(arguments: dict[str, Any], channel: Any) -> Any:
    """The sums behind the rows of every region."""
    note, sum_out = regions.note, regions.sum_out

    def unnoted(tally: Any, how: str, *given: Any, **named: Any) -> None:
        if how != "sum_out":
            note(tally, how, *given, **named)

    def hidden(*given: Any) -> Any:
        enter = BOOK.enter
        BOOK.enter = lambda **entry: None  # type: ignore[method-assign]
        try:
            return sum_out(*given)
        finally:
            BOOK.enter = enter  # type: ignore[method-assign]

    regions.note, regions.sum_out = unnoted, hidden
    return parallel_run(arguments, channel)


class _Forgetful(list[Any]):
    """A list that keeps nothing."""

    def append(self, entry: Any) -> None:
        pass


def attention(arguments: dict[str, Any], channel: Any) -> Any:
    """All hops around the ring."""
    attend = SequenceCut.attend

    def unnoted(self: SequenceCut, *given: Any) -> Any:
        self.calls = _Forgetful()
        return attend(self, *given)

    SequenceCut.attend = unnoted  # type: ignore[method-assign]
    _leave_out("cp", "send", "recv")
    return parallel_run(arguments, channel)


def rows_of_experts(arguments: dict[str, Any], channel: Any) -> Any:
    """All exchanges of tokens, answers and their gradients."""
    shard_experts.take_routed = lambda model: []
    import shoal.runtime.traffic as traffic

    traffic.take_routed = shard_experts.take_routed  # type: ignore[attr-defined]
    _leave_out("ep", "all_to_all")
    return parallel_run(arguments, channel)


def activations(arguments: dict[str, Any], channel: Any) -> Any:
    """All messages between stages."""
    Borders.crossings = lambda self, stages, before: {}  # type: ignore[method-assign]
    _leave_out("pp", "send", "recv")
    return parallel_run(arguments, channel)


def gathers_twice(arguments: dict[str, Any], channel: Any) -> Any:
    """Blocks are gathered, given back, and gathered again."""
    gather = ParameterGathering.gather

    def faulty(self: ParameterGathering, unit: ShardedUnit, phase: str) -> None:
        gather(self, unit, phase)
        if not unit.is_root:
            self.free(unit)
            gather(self, unit, phase)

    ParameterGathering.gather = faulty  # type: ignore[method-assign]
    return parallel_run(arguments, channel)


def gathers_what_is_left_out(arguments: dict[str, Any], channel: Any) -> Any:
    """Every micro-batch also gathers the blocks that it has not called."""
    finish = ParameterGathering.finish

    def faulty(self: ParameterGathering, *, root: bool = True) -> None:
        for unit in self.units:
            if not unit.called and not unit.is_root and any(other.called for other in self.units):
                self.gather(unit, "backward")
        finish(self, root=root)

    ParameterGathering.finish = faulty  # type: ignore[method-assign]
    return parallel_run(arguments, channel)
