"""The empirical survey's comparison (Nichols et al. 2021) in kind: data parallelism, ZeRO, intra-layer and inter-layer
frameworks, with the batch of each rank fixed, on the ranks that are here, beside what the cost model says of the
survey's own machines.

`survey.json` has the simulated curves; `python -m benchmarks.comparison_predicted --json` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.strategy import Strategy, StrategyError, parse, pp, recompute, tp

SIMULATED = Path(__file__).with_name("survey.json")
CONTESTANTS = (
    "dp(2)",
    "torch-ddp",
    "dp(2, zero=1)",
    "dp(2, zero=2)",
    "dp(2, zero=3)",
    "torch-fsdp2",
    "deepspeed-zero1",
    "deepspeed-zero2",
    "deepspeed-zero3",
    "tp(2)",
    "torch-tensor-parallel",
    "pp(2, 'gpipe', micro=8)",
    "pp(2, '1f1b', micro=8)",
    "pp(2, 'pipedream', micro=8)",
    "torch-pipelining",
    "accumulate(8) * recompute('full')",
)
"""All classes of parallelism of the survey; the last one is GPipe on one device."""
RANKS = (1, 2)
CLASSES = ("DDP", "ZeRO", "intra-layer", "inter-layer")
PLACES = {"lassen": "Lassen, simulated", "thetagpu": "ThetaGPU, simulated"}


def class_of(text: str) -> str | None:
    """Which of the survey's classes a strategy belongs to; None for one that is not among them."""
    try:
        strategy = parse(text)
    except StrategyError:
        return None
    if strategy.world == 1:
        return "inter-layer" if strategy.term(recompute) is not None else "serial"
    kinds = [
        ("inter-layer", strategy.term(pp) is not None),
        ("intra-layer", strategy.term(tp) is not None),
        ("ZeRO", any(level.zero for level in strategy.dp_levels)),
        ("DDP", _replicated(strategy)),
    ]
    return next((name for name, so in kinds if so), None)


def _replicated(strategy: Strategy) -> bool:
    return [str(axis.term) for axis in strategy.axes] == [f"dp({strategy.world})"]


def survey_of(rows: Sequence[Mapping[str, Any]], *, task: str) -> dict[str, Any]:
    """The curves and findings of one job: here, and as simulated for the survey's model of the same kind.

    Args:
        rows: The comparison's.
        task: `gpt2` or `vgg16`: which of the survey's tasks stands beside it.
    """
    here = _here(rows)
    simulated = json.loads(SIMULATED.read_text(encoding="utf-8"))[task]
    places = {"this machine": here} | {title: simulated[name] for name, title in PLACES.items()}
    return {
        "task": {"gpt2": "GPT2-medium", "vgg16": "VGG-16"}[task],
        "places": [{"place": place, "curves": relative(curves)} for place, curves in places.items()],
        "findings": _findings(places),
    }


def _here(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Class -> ranks -> the fastest of its contestants. One rank alone is the start of every class but inter-layer,
    which on one device is GPipe's micro-batches."""
    found: dict[str, dict[str, Any]] = {name: {} for name in CLASSES}
    for row in rows:
        if not row.get("step_s") or row["verdict"] in ("unfair", "failed"):
            continue
        of = class_of(row["name"] if row["own"] else row["same_as"] or "")
        classes = [name for name in CLASSES if name != "inter-layer"] if of == "serial" else [of] if of else []
        for name in classes:
            kept = found[name].get(str(row["ranks"]))
            if kept is None or row["epoch_s"] < kept["epoch_s"]:
                found[name][str(row["ranks"])] = {
                    "epoch_s": row["epoch_s"],
                    "memory_bytes": row["memory_bytes"],
                    "name": row["name"],
                    "messages": _messages(row),
                }
    return found


def _messages(row: Mapping[str, Any]) -> float:
    split = row.get("split_s") or {}
    total = sum(split.values())
    return float((split.get("communication", 0.0) + split.get("waiting", 0.0)) / total) if total else 0.0


def relative(curves: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """Class -> [ranks, epoch, memory, what] relative to data parallelism on one device."""
    one = curves["DDP"].get("1")
    if one is None:
        return {}
    return {
        name: [
            [int(ranks), point["epoch_s"] / one["epoch_s"], _over(point, one, "memory_bytes"), point.get("name", name)]
            for ranks, point in sorted(of.items(), key=lambda pair: int(pair[0]))
        ]
        for name, of in curves.items()
        if of
    }


def _over(point: Mapping[str, Any], one: Mapping[str, Any], field: str) -> float | None:
    value, start = point.get(field), one.get(field)
    return value / start if value and start else None


QUESTIONS = (
    ("ZeRO's time over DDP's", "1.10 to 1.15 at most", "ZeRO", "DDP", "epoch_s", "most"),
    ("ZeRO's memory over DDP's", "0.42 to 0.66", "ZeRO", "DDP", "memory_bytes", "most"),
    ("intra-layer's time over DDP's", "plateaus across nodes", "intra-layer", "DDP", "epoch_s", "most"),
    ("intra-layer's memory over DDP's", "U-shaped", "intra-layer", "DDP", "memory_bytes", "most"),
    ("inter-layer's memory over DDP's", "less than half", "inter-layer", "DDP", "memory_bytes", "most"),
    ("GPipe's time on one device over DDP's", "5.2 (GPT2), 1.8 (VGG-16)", "inter-layer", "DDP", "epoch_s", "one"),
)
"""(finding, published, class, over which class, of what, on the most ranks that both have or on one)."""


def _findings(places: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for what, published, first, second, field, where in QUESTIONS:
        cells = []
        for curves in places.values():
            both = set(curves.get(first, {})) & set(curves.get(second, {}))
            ranks = "1" if where == "one" else max(both - {"1"}, key=int, default="")
            one, other = (curves.get(name, {}).get(ranks, {}).get(field) for name in (first, second))
            cells.append(f"{one / other:.2f} on {ranks}" if one and other else "-")
        rows.append({"what": what, "published": published, "found": cells})
    cells = []
    for curves in places.values():
        of = curves.get("intra-layer", {})
        most = max(set(of) - {"1"}, key=int, default="")
        share = of[most].get("messages") if most else None
        cells.append("-" if share is None else f"{share:.0%} on {most}")
    return [*rows, {"what": "messages in intra-layer's step", "published": "52.5% on 16", "found": cells}]
