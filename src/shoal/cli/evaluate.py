"""`shoal evaluate`: the validation metrics of a trained model."""

from __future__ import annotations

from typing import Any


def evaluate_command(run: str, *, strategy_text: str | None = None, as_json: bool = False, **options: Any) -> int:
    """Evaluates on ranks of this machine and prints the metrics."""
    from rich.console import Console

    from shoal.api.evaluate import evaluate
    from shoal.cli.output import emitter

    with emitter(_print, as_json=as_json) as show:
        with Console(stderr=True).status("evaluating"):
            strategy = "serial" if strategy_text is None else strategy_text
            outcome = evaluate(run, strategy=strategy, **options).to_json()
        show(outcome)
    return 0


def _print(outcome: dict[str, Any]) -> None:
    print(f"{outcome['job']}, step {outcome['step']}, {outcome['samples']:,} validation samples")
    for name, value in outcome["metrics"].items():
        print(f"  {name:<14} {value:.6g}")
