"""`shoal evaluate`: the validation metrics of a trained model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any


def evaluate_command(
    run: str, *, strategy_text: str | None = None, step: int | None = None, job: str | None = None,
    as_json: bool = False,
) -> int:  # fmt: skip
    """Evaluates on ranks of this machine and prints the metrics."""
    from rich.console import Console

    from shoal.cli.output import emitter
    from shoal.launch import run_ranks
    from shoal.parallel.runnable import require_runnable
    from shoal.runtime.options import JobOptions
    from shoal.strategy import parse, require_legal
    from shoal.training.evaluate import EvaluateOptions, evaluate_run
    from shoal.training.record.run import RUN, read_json

    given = Path(run)
    folder = given.parent.parent if given.name.startswith("step-") else given
    arguments = read_json(folder / RUN).get("arguments") or {}
    known = {each.name for each in fields(JobOptions)}
    of_job = {name: value for name, value in arguments.items() if name in known}
    strategy = parse("serial" if strategy_text is None else strategy_text)
    require_legal(strategy)
    require_runnable(strategy)
    options = EvaluateOptions.from_json(
        {**of_job, "run": run, "step": step, "strategy": str(strategy)} | ({"job": job} if job is not None else {})
    )
    with emitter(_print, as_json=as_json) as show:
        with Console(stderr=True).status("evaluating"):
            outcome = run_ranks(evaluate_run, options.to_json(), ranks=strategy.world)[0]
        show(outcome)
    return 0


def _print(outcome: dict[str, Any]) -> None:
    print(f"{outcome['job']}, step {outcome['step']}, {outcome['samples']:,} validation samples")
    for name, value in outcome["metrics"].items():
        print(f"  {name:<14} {value:.6g}")
