"""Shoal's strategies beside the framework that does the same: throughput, memory and loss, in one comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.strategy import StrategyError, parse


def beside(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for each pair of a strategy and a framework that names it as its equal, on as many ranks.

    `speed` is the strategy's throughput over the framework's, `memory` the same of peak memory; `why` is what held the
    strategy back where it is slower.
    """
    found, fair = [], [row for row in rows if row["step_s"] and row["verdict"] != "unfair"]
    for own in (row for row in fair if row["own"]):
        for peer in (row for row in fair if not row["own"] and row["ranks"] == own["ranks"]):
            if not _same(own, peer):
                continue
            speed, memory = peer["step_s"] / own["step_s"], own["memory_bytes"] / max(1.0, peer["memory_bytes"])
            found.append(
                {
                    "name": own["name"],
                    "peer": peer["name"],
                    "ranks": own["ranks"],
                    "speed": speed,
                    "memory": memory,
                    # Of a quotient: relative spreads add up in squares.
                    "speed_spread": speed * (_part(own, "step") ** 2 + _part(peer, "step") ** 2) ** 0.5,
                    "own_final": own["final"],
                    "peer_final": peer["final"],
                    "why": own["held_back"] if speed < 1 else None,
                }
            )
    return found


def _same(own: Mapping[str, Any], peer: Mapping[str, Any]) -> bool:
    try:
        return str(parse(peer["same_as"] or "")) == own["name"]
    except StrategyError:
        return False


def _part(row: Mapping[str, Any], name: str) -> float:
    return float(row[f"{name}_spread_s"] / row[f"{name}_s"])


def beside_lines(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """As Markdown."""
    if not pairs:
        return []
    lines = [
        "### Beside the framework that does the same",
        "",
        "| strategy | framework | ranks | throughput over its | memory over its | final, both | held back by |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in pairs:
        finals = [f"{value:.4g}" if value is not None else "-" for value in (each["own_final"], each["peer_final"])]
        speed = f"{each['speed']:.2f}" + (f" ± {each['speed_spread']:.2f}" if each["speed_spread"] else "")
        lines.append(
            f"| `{each['name']}` | `{each['peer']}` | {each['ranks']} | {speed} | {each['memory']:.2f} "
            f"| {', '.join(finals)} | {each['why'] or ''} |"
        )
    return [*lines, ""]
