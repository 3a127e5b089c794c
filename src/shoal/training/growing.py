"""Replicas that come to a run under way, as options say it (`--join "2 at step 40"`), and the strategy with them."""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.strategy import Strategy, dp
from shoal.strategy.islands import is_loose, losable
from shoal.strategy.seats import seats_of

_JOIN = re.compile(r"(?P<replicas>\d+)\s+at\s+step\s+(?P<step>\d+)")


class BadJoin(ValueError):
    """Replicas that cannot come, in one sentence."""


class Join(NamedTuple):
    """Further replicas of the outermost level, from a step on, counted from 1."""

    replicas: int
    step: int


def read_join(text: str | None) -> Join | None:
    """Of an option's text; a BadJoin says what is wrong with it."""
    if not text:
        return None
    match = _JOIN.fullmatch(text.strip())
    if match is None or not int(match["replicas"]) or not int(match["step"]):
        raise BadJoin(f'--join {text!r}: expected a number of replicas and a step, such as "2 at step 40"')
    return Join(int(match["replicas"]), int(match["step"]))


def grown(strategy: Strategy, replicas: int) -> Strategy:
    """The strategy with so many more replicas of its outermost level; their ranks come after all others."""
    level, seats = strategy.terms[0], seats_of(strategy)
    if not isinstance(level, dp) or not is_loose(level):
        raise BadJoin(
            f"--join: {strategy} has no level of replicas on the outside that run by themselves, so none can come "
            "while the others work; use sync=local(h), diloco(h), gossip(...), asp() or ssp(s), or stop the run and "
            "resume it with more ranks"
        )
    if seats is not None and not seats.colocated:
        raise BadJoin(
            f"--join: the servers of {level} have the ranks after its replicas, so no replica can come after them; use "
            "via=ps(shards, colocated=True), or stop the run and resume it with more ranks"
        )
    return Strategy(level.replace(n=level.n + replicas), *strategy.terms[1:])


def require_can_come(
    strategy: Strategy, *, rejoin: bool, join: str | None, checkpoints: bool, weights_only: bool
) -> None:
    """Refuses ranks that are to come where none can: before any rank starts."""
    asked = read_join(join)
    if asked is not None:
        grown(strategy, asked.replicas)
    if rejoin and len(losable(strategy)) < 2:
        raise BadJoin(
            f"--rejoin: under {strategy} no rank can be lost while the others go on, so none comes back; use "
            "sync=local(h), diloco(h), gossip(...), asp() or ssp(s), or start the same command again with --go-on"
        )
    if asked is not None and len(losable(grown(strategy, asked.replicas))) < 2:
        raise BadJoin(
            f"--join: under {strategy} no rank can be missing while the others go on; stop the run, and resume it with "
            "more ranks"
        )
    if (rejoin or asked) and (weights_only or not checkpoints):
        why = "--weights-only leaves out what it needs" if weights_only else "--checkpoint-every 0 writes none"
        raise BadJoin(f"--{'rejoin' if rejoin else 'join'}: who comes goes on from a checkpoint, and {why}")
