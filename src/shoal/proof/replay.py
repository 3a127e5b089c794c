"""Replays the log of an asynchronous run in the serial run of a proof.

Which exchange came before which update is decided by timing, so there is no run to expect: a proof takes the order from
the islands' logs and everything else from plain PyTorch. A log is a list of rows (kind, island, clock, partner, the
partner's clock), in the order in which they happened to one island's model:

    update    the change of an update, from 1, is added to the model; partner and partner's clock are the step, from 0,
              and the share of its batch that it learned from
    read      the model becomes the parameters that the next step computes with
    average   `island` exchanges with `partner`; both have a row of it, unless they are the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.proof.islands import Island

Row = Sequence[Any]
Update = Callable[[int, int, int], tuple[float, float]]
"""Makes an update on an island's parameters, from a share of a step (from 0): the sum of its losses and their count."""


class ContradictoryLog(ValueError):
    """Logs of islands that no order of events explains."""


def in_order(logs: Sequence[Sequence[Row]]) -> list[Row]:
    """All rows in an order that is each island's own; an exchange of two appears once."""
    at, found = [0] * len(logs), []

    def head(island: int) -> Row | None:
        return logs[island][at[island]] if at[island] < len(logs[island]) else None

    while True:
        moved = False
        for island in range(len(logs)):
            while (row := head(island)) is not None:
                partner = int(row[3]) if island == row[1] else int(row[1])
                both = row[0] == "average" and partner != island
                if both:
                    other = head(partner)
                    if other is None or list(other) != list(row):
                        break
                    at[partner] += 1
                at[island] += 1
                found.append(row)
                moved = True
        if not moved:
            break
    left = [row for island in range(len(logs)) if (row := head(island)) is not None]
    if left:
        raise ContradictoryLog(f"the logs of the islands contradict each other at {[list(row) for row in left]}")
    return found


def replay(
    logs: Sequence[Sequence[Row]],
    copies: Sequence[Island],
    update: Update,
    pair: Callable[[Any, Any], None],
) -> list[tuple[float, float]]:
    """Does what the logs say; `pair` is an exchange of two, given what both keep. Returns the first one's sums."""
    sums = []
    for kind, island, _, partner, number in in_order(logs):
        copy = copies[island]
        params = list(copy.named.values())
        if kind == "update":
            read = [param.detach().clone() for param in params]
            found = update(island, partner, number)
            with torch.no_grad():
                for model, now, was in zip(copy.kept["model"], params, read, strict=True):
                    model.add_(now - was)
            if island == 0:
                sums.append(found)
        elif kind == "read":
            with torch.no_grad():
                for param, model in zip(params, copy.kept["model"], strict=True):
                    param.copy_(model)
        elif kind == "average":
            with torch.no_grad():
                pair(copy.kept, copies[partner].kept)
        else:
            raise ContradictoryLog(f"a log has a row of kind {kind!r}")
    return sums
