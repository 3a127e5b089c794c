"""A level that compresses over a hierarchical all-reduce, as two levels: dense inside hosts, compressed between them.

`dp(8, via=allreduce("hierarchical"), compress=c)` on two hosts of four ranks is `dp(2, compress=c) * dp(4)`. Where its
ranks lie only shows when they run, so the engine asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shoal.strategy import Strategy, allreduce, dp, none


def asks_for_hosts(strategy: Strategy) -> bool:
    """Whether it depends on hosts how the strategy runs."""
    return any(_is_hierarchical(level) for level in strategy.dp_levels)


def by_hosts(strategy: Strategy, hosts: Sequence[str]) -> Strategy:
    """The strategy for ranks on these hosts. A level whose ranks do not fill hosts evenly and in order stays one."""
    terms: list[object] = []
    axes = [axis.size for axis in strategy.axes]
    for place, term in enumerate(strategy.terms):
        if not isinstance(term, dp) or not _is_hierarchical(term):
            terms.append(term)
            continue
        inside = _per_host(hosts, size=term.n, stride=prod(axes[place + 1 :]))
        if inside == term.n:
            terms.append(dp(term.n))
        else:
            terms.append(dp(term.n // inside, compress=term.compress))
            terms += [dp(inside)] if inside > 1 else []
    return Strategy(*terms)  # type: ignore[arg-type]


def _is_hierarchical(term: dp) -> bool:
    hierarchical = isinstance(term.via, allreduce) and term.via.by_hosts
    return hierarchical and not isinstance(term.compress, none) and not term.zero


def _per_host(hosts: Sequence[str], *, size: int, stride: int) -> int:
    """How many neighbours along an axis share a host; 1 where that is not the same everywhere."""
    lines = [
        [hosts[first + step * stride] for step in range(size)]
        for block in range(0, len(hosts), size * stride)
        for first in range(block, block + stride)
    ]
    inside = next((step for step in range(1, size) if lines[0][step] != lines[0][0]), size)
    for line in lines:
        blocks = [line[start : start + inside] for start in range(0, size, inside)]
        if any(len(block) != inside or len(set(block)) > 1 for block in blocks) or len(set(line)) != len(blocks):
            return 1
    return inside
