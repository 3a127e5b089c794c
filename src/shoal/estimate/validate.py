"""Predicts rows of published measurements and says how good the predictions are: by source, in time, memory and rank.

Errors are relative to what was measured. Regret is what a user would have lost by taking the plan ranked first; the
planner's view also counts a plan that was predicted to fit and did not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.estimate.cost import gathered, price, read_rows
from shoal.estimate.cost.memory import GIB
from shoal.estimate.cost.rows import BadRows

Row = Mapping[str, str]
SAME = 1 + 1e-9
"""Predictions this close are a tie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What is said of one row; None where nothing is."""

    id: str
    step_s: float | None = None
    memory_gib: float | None = None
    fits: bool | None = None
    reason: str = ""
    """Why nothing is said."""


def predict(rows: Sequence[Row]) -> list[Prediction]:
    """One prediction a row, in order; a row that cannot be estimated carries the reason."""
    read = read_rows(rows)
    prices = price(read.inputs, gathered(read.profiles, read.profile_index))
    steps, memories = prices.step_s, prices.memory_bytes / GIB
    found: list[Prediction | None] = [None] * len(rows)
    for place, number in enumerate(read.priced):
        found[number] = Prediction(
            id=rows[number].get("id", str(number + 1)),
            step_s=float(steps[place]),
            memory_gib=float(memories[place]),
            fits=bool(prices.fits[place]),
        )
    for number, reason in read.refused:
        found[number] = Prediction(id=rows[number].get("id", str(number + 1)), reason=reason)
    return [each for each in found if each is not None]


def score(rows: Sequence[Row], predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    """Metrics of all rows and of each source."""
    if len(rows) != len(predictions):
        raise BadRows(f"{len(predictions)} predictions for {len(rows)} rows; expected one for each")
    pairs = list(zip(rows, predictions, strict=True))
    sources = sorted({row.get("source", "") for row in rows} - {""})
    scores = {"all": _metrics(pairs)}
    for source in sources:
        scores[source] = _metrics([pair for pair in pairs if pair[0].get("source") == source])
    return scores


Pairs = list[tuple[Row, Prediction]]


def _metrics(pairs: Pairs) -> dict[str, Any]:
    ran = [(row, guess) for row, guess in pairs if row.get("status", "ok") in ("ok", "")]
    timed = [(row, guess) for row, guess in ran if _real(row, "step_s")]
    known = [(row, guess) for row, guess in timed if guess.step_s]
    scores: dict[str, Any] = {
        "n": len(known),
        "coverage": round(len(known) / len(timed), 3) if timed else None,
        **_errors([(guess.step_s, _real(row, "step_s")) for row, guess in known]),
        **_ranking(known),
    }
    remembered = [
        (guess.memory_gib, _real(row, "memory_gib"))
        for row, guess in ran
        if guess.memory_gib and _real(row, "memory_gib")
    ]
    if remembered:
        scores["memory_n"] = len(remembered)
        scores.update({f"memory_{name}": value for name, value in _errors(remembered).items()})
    labels = _confusion(pairs)
    if labels:
        scores["oom"] = labels
        scores["oom_clean"] = _confusion(
            [(row, guess) for row, guess in pairs if "status" not in row.get("assumed", "").split(";")]
        )
    plan = _planned(pairs)
    if plan:
        scores["plan"] = plan
    return scores


def _errors(pairs: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    table = np.array([(guess, real) for guess, real in pairs], dtype=float)
    if not len(table):
        return {}
    off = table[:, 0] / table[:, 1] - 1
    percent = {
        "mape": np.mean(abs(off)),
        "median_ape": np.median(abs(off)),
        "bias": np.mean(off),
        "within_20": np.mean(abs(off) <= 0.2),
    }
    return {name: round(100 * float(value), 1) for name, value in percent.items()}


def _groups(pairs: Pairs, enough: Callable[[Pairs], bool]) -> list[Pairs]:
    found: dict[str, Pairs] = defaultdict(list)
    for row, guess in pairs:
        if row.get("group"):
            found[row["group"]].append((row, guess))
    return [group for group in found.values() if enough(group)]


def _ranking(known: Pairs) -> dict[str, Any]:
    """Regret of the plan ranked first and rank correlation, over groups in which only the strategy differs."""
    regrets, at_random, correlations = [], [], []
    for group in _groups(known, lambda group: len(group) >= 3):
        guess = np.array([guess.step_s for _, guess in group], dtype=float)
        real = np.array([_real(row, "step_s") for row, _ in group], dtype=float)
        regrets.append(float(np.mean(real[guess <= guess.min() * SAME]) / real.min()))
        at_random.append(float(np.mean(real) / real.min()))
        correlations.append(_correlation(_ranks(guess), _ranks(real)))
    if not regrets:
        return {}
    return {
        "groups": len(regrets),
        "regret_mean": round(float(np.mean(regrets)), 3),
        "regret_max": round(max(regrets), 3),
        "regret_random": round(float(np.mean(at_random)), 3),
        "spearman": round(float(np.mean(correlations)), 3),
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order, ties sharing the mean of theirs."""
    order = np.argsort(values, kind="stable")
    places, start = np.empty(len(values)), 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] <= values[order[start]] * SAME:
            stop += 1
        places[order[start : stop + 1]] = (start + stop) / 2
        start = stop + 1
    return places


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one - one.mean(), other - other.mean()
    spread = float((one @ one) * (other @ other))
    return float(one @ other) / spread**0.5 if spread else 0.0


def _confusion(pairs: Pairs) -> dict[str, Any] | None:
    """Out of memory, as labelled and as predicted; None without labels."""
    labelled = [(row.get("status") == "oom", not guess.fits) for row, guess in pairs if guess.fits is not None]
    real, said = (np.array([pair[i] for pair in labelled], dtype=bool) for i in (0, 1))
    if not real.any():
        return None
    tp, fp, fn, tn = (int(np.sum(cell)) for cell in (real & said, ~real & said, real & ~said, ~real & ~said))
    return {
        "n": len(labelled),
        "oom": tp + fn,
        "accuracy": round(100 * (tp + tn) / len(labelled), 1),
        "precision": round(100 * tp / (tp + fp), 1) if tp + fp else None,
        "recall": round(100 * tp / (tp + fn), 1),
        "tp": tp,
        "fp": fp,
        "fn": fn,
        "tn": tn,
    }


def _planned(pairs: Pairs) -> dict[str, Any] | None:
    """Of each group the fastest plan predicted to fit: did it fit, and what did it cost compared with the best?"""
    failed, regrets, groups = 0, [], 0
    for group in _groups(pairs, lambda group: any(row.get("status") == "oom" for row, _ in group)):
        times = [_real(row, "step_s") for row, _ in group if row.get("status") == "ok"]
        ran = [time for time in times if time]
        if len(ran) < 3:
            continue
        groups += 1
        fitting = [(row, guess) for row, guess in group if guess.fits and guess.step_s]
        row = min(fitting, key=lambda pair: pair[1].step_s or np.inf)[0] if fitting else None
        time = _real(row, "step_s") if row is not None and row.get("status") == "ok" else None
        if time:
            regrets.append(time / min(ran))
        else:
            failed += 1
    if not groups:
        return None
    return {
        "groups": groups,
        "oom_or_none": failed,
        "regret_mean": round(float(np.mean(regrets)), 3) if regrets else None,
    }


def _real(row: Row, name: str) -> float | None:
    text = row.get(name, "")
    return float(text) if text not in (None, "") else None
