"""Collectives that nobody counts, planted on purpose: what crosses the ranks crosses them past the ledger, and what the
engine keeps of it for its own account is missing too. The numbers come out right, so that the traffic predicted before
the run must give them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import shoal.parallel.context.cut as sequence
import shoal.parallel.expert.exchange as experts
import shoal.parallel.tensor.regions as regions
from shoal.comm.ledger import BOOK
from shoal.parallel.pipeline.borders import Borders
from shoal.train.verify.certify import parallel_run


@contextmanager
def _uncounted() -> Iterator[None]:
    before = {key: list(entry) for key, entry in BOOK._entered.items()}
    try:
        yield
    finally:
        BOOK._entered = before


def _hidden(call: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(*given: Any, **named: Any) -> Any:
        with _uncounted():
            return call(*given, **named)

    return hidden


def out_of_regions(arguments: dict[str, Any], channel: Any) -> Any:
    """The sum behind the rows of every region."""
    regions.sum_out = _hidden(regions.sum_out)
    regions.note = lambda *given, **named: None
    return parallel_run(arguments, channel)


def attention(arguments: dict[str, Any], channel: Any) -> Any:
    """The hops of every forward of the ring."""
    attend = sequence.SequenceCut.attend

    def hidden(self: sequence.SequenceCut, args: Any, kwargs: Any) -> Any:
        noted = len(self.calls)
        with _uncounted():
            result = attend(self, args, kwargs)
        del self.calls[noted:]
        return result

    sequence.SequenceCut.attend = hidden  # type: ignore[method-assign]
    return parallel_run(arguments, channel)


class _Forgetful(list[Any]):
    """A history that keeps nothing."""

    def append(self, run: Any) -> None:
        pass


def rows_of_experts(arguments: dict[str, Any], channel: Any) -> Any:
    """The rows on their way to experts, and all that the layers note of their runs."""
    import shoal.parallel.expert.deal_out as deal_out

    experts.Round.there = _hidden(experts.Round.there)  # type: ignore[method-assign]
    deal_out.deque = lambda maxlen: _Forgetful()  # type: ignore[attr-defined]
    return parallel_run(arguments, channel)


def activations(arguments: dict[str, Any], channel: Any) -> Any:
    """What a stage sends on, and receives of the stage before."""
    send, receive = Borders.send, Borders.receive

    def hidden(call: Callable[..., Any]) -> Callable[..., Any]:
        def unnoted(self: Borders, *given: Any) -> Any:
            noted = {border: list(rows) for border, rows in self.crossed.items()}
            with _uncounted():
                result = call(self, *given)
            self.crossed = noted
            return result

        return unnoted

    Borders.send, Borders.receive = hidden(send), hidden(receive)  # type: ignore[method-assign]
    return parallel_run(arguments, channel)
