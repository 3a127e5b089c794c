"""One case under drawn strategies: trained by Shoal, perhaps resumed under another strategy, and held to the oracle.

A case ends in one of four ways. `equal`: parameters, buffers and loss are the oracle's. `refused`: Shoal did not train
it and gave a reason. `ill-conditioned`: rounding alone moves the oracle too far to judge. `failed`: anything else.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import oracle
from fuzz.cases import Case, case_of, strategy_of
from shoal.launch import RankFailed
from shoal.strategy import Strategy, StrategyError, TermError, bsp, parse, ps
from shoal.training.local import train_job

TOLERANCE = 1e-8
"""Of a relative difference in float64. Faults measure 1e-5 and more."""
JITTER = 1e-15
HANG_S = 90.0
TRIES = 3
"""Strategies drawn for a case until one is not refused."""
ELEMENTWISE = {
    "SGD",
    "momentum",
    "nesterov",
    "Adam",
    "AdamW",
    "amsgrad",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
}


@dataclass(frozen=True)
class Verdict:
    """How one case ended under one strategy, or a chain of two."""

    number: int
    strategies: tuple[str, ...]
    end: str
    detail: str
    difference: float = 0.0

    def __str__(self) -> str:
        return f"case {self.number} under {' then '.join(self.strategies)}: {self.end} ({self.detail})"


def judge(number: int, *, most_ranks: int = 8) -> Iterator[Verdict]:
    """The verdicts of a case: refusals, then the first strategy that trains."""
    case = case_of(number)
    draw = random.Random(f"strategies of {number}")
    for _ in range(TRIES):
        chain = [strategy_of(case, draw, most_ranks=most_ranks)]
        if draw.random() < 0.4:
            chain.append(strategy_of(case, draw, most_ranks=most_ranks))
        verdict = judge_under(case, tuple(chain))
        yield verdict
        if verdict.end != "refused":
            return


def judge_under(case: Case, chain: tuple[str, ...]) -> Verdict:
    try:
        strategies = [parse(text) for text in chain]
    except (StrategyError, TermError) as error:
        return Verdict(case.seed, chain, "refused", f"text: {error}")
    if case.dropout:
        return _by_proof(case, chain)
    micros = {strategy.micro_batches for strategy in strategies}
    per_micro = case.batch_norm or "ema" in case.blocks
    if per_micro and len(micros) > 1:
        # Batch norm and buffers make the micro-batch part of the model: both runs must have the same.
        chain, strategies = chain[:1], strategies[:1]
    micro = strategies[0].micro_batches if per_micro else 1
    expected = oracle.train(case, micro_batches=micro)
    shaken = oracle.train(case, micro_batches=micro, jitter=JITTER)
    conditioning, _ = oracle.distance(shaken.tensors, expected.tensors)
    if not conditioning <= TOLERANCE / 100:
        return Verdict(case.seed, chain, "ill-conditioned", f"rounding moves the oracle by {conditioning:.1e}")
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as work:
        try:
            run = _train(case, chain, Path(work))
        except RankFailed as error:
            end = "refused" if error.for_user else "failed"
            return _refusal(case, strategies, chain, end, f"{error.error_type}: {error}\n{error.traceback_text}")
        except ValueError as error:
            return _refusal(case, strategies, chain, "refused", f"{type(error).__name__}: {error}")
        found = oracle.read_checkpoint(run)
        loss = _last_loss(run)
    difference, where = oracle.distance(found, expected.tensors)
    loss_apart = abs(loss - expected.losses[-1]) / max(abs(expected.losses[-1]), 1e-3)
    # Of islands the record has the first one's loss.
    if loss_apart > difference and all(level.sync == bsp() for level in strategies[-1].dp_levels):
        difference, where = loss_apart, "the loss of the last step"
    if not difference <= TOLERANCE:
        return Verdict(case.seed, chain, "failed", f"{where} differs by {difference:.1e}", difference)
    return Verdict(case.seed, chain, "equal", where, difference)


def _train(case: Case, chain: tuple[str, ...], work: Path) -> Path:
    """The folder of the last run of the chain."""
    file = work / "fuzzed.py"
    tests = Path(__file__).resolve().parents[1]
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(tests)!r})\nfrom fuzz.job import job_of\njob = job_of({case.seed})\n"
    )
    folder = work / "0"
    for number, text in enumerate(chain):
        steps = case.steps if number == len(chain) - 1 else max(1, case.steps // 2)
        options: dict[str, Any] = {"resume": str(folder)} if number else {}
        folder = work / str(number)
        train_job(
            str(file), text, folder=folder, steps=steps, checkpoint_every=case.steps, hang_after_s=HANG_S, **options
        )
    return folder


def _last_loss(folder: Path) -> float:
    from shoal.training.record.run import read_run

    return float(read_run(folder).losses[-1])


def _by_proof(case: Case, chain: tuple[str, ...]) -> Verdict:
    """With dropout only a proof draws the same masks as a serial run."""
    from shoal.proof.certify import verify

    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as work:
        file = Path(work) / "fuzzed.py"
        tests = Path(__file__).resolve().parents[1]
        file.write_text(
            f"import sys\nsys.path.insert(0, {str(tests)!r})\nfrom fuzz.job import job_of\njob = job_of({case.seed})\n"
        )
        strategies = [parse(chain[0])]
        try:
            proof = verify(str(file), strategies[0], steps=case.steps)
        except RankFailed as error:
            end = "refused" if error.for_user else "failed"
            return _refusal(case, strategies, chain[:1], end, f"{error.error_type}: {error}\n{error.traceback_text}")
        except ValueError as error:
            return _refusal(case, strategies, chain[:1], "refused", f"{type(error).__name__}: {error}")
    split = strategies[0].replicas > 1 and (not case.averages_buffers or strategies[0].micro_batches > 1)
    if not proof.passed and "ema" in case.blocks and split:
        # Replicas update it from their own samples, and the job does not say what becomes of it, or it is read again
        # within the step: the certificate is denied.
        return Verdict(case.seed, chain[:1], "refused", f"proof: {proof.worst} differs", proof.max_rel_diff)
    unprovable = next((note for note in proof.notes if note.startswith("this job cannot be proven")), "")
    if not proof.passed and unprovable:
        return Verdict(case.seed, chain[:1], "ill-conditioned", unprovable)
    if not proof.passed:
        detail = f"proof: {proof.worst} differs by {proof.max_rel_diff:.1e}; ledger {proof.ledger_differences[:2]}"
        return Verdict(case.seed, chain[:1], "failed", detail, proof.max_rel_diff)
    return Verdict(case.seed, chain[:1], "equal", f"proof: {proof.worst}", proof.max_rel_diff)


def _refusal(case: Case, strategies: list[Strategy], chain: tuple[str, ...], end: str, detail: str) -> Verdict:
    """What plainly can be trained must not be refused."""
    if end == "refused" and all(_must_train(case, strategy) for strategy in strategies):
        return Verdict(case.seed, chain, "failed", f"refused without need: {detail}")
    return Verdict(case.seed, chain, end, detail)


def _must_train(case: Case, strategy: Strategy) -> bool:
    plain = all(type(term).__name__ in ("dp", "accumulate", "recompute") for term in strategy.terms)
    plain = plain and all(level.sync == bsp() and not isinstance(level.via, ps) for level in strategy.dp_levels)
    ordinary = not case.coupled and "ema" not in case.blocks and case.optimizer in ELEMENTWISE
    even = case.batch % (strategy.replicas * strategy.micro_batches) == 0
    return plain and ordinary and even and case.last_batch == "wrap" and not case.dropout
