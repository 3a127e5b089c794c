"""`shoal demo`: explain, verify, train and compare on both built-in tasks, in about two minutes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

EXPLAINED = "dp(2) * dp(2, zero=3)"
COMPARED = {
    "language:tiny": ["serial", "dp(2)", "dp(2, zero=1)", "dp(2, zero=3) * recompute('full')"],
    "image:tiny": ["serial", "dp(2)", "dp(2, zero=2) * accumulate(2)"],
}
STEPS_PROVEN = 5


def run_demo() -> int:
    from rich.console import Console
    from rich.table import Table

    from shoal.launch import run_ranks, warm_up
    from shoal.strategy import parse
    from shoal.training.entry import train_run
    from shoal.training.options import TrainOptions

    console = Console()
    started = time.perf_counter()
    warm_up()

    console.rule(f"1. shoal explain '{EXPLAINED}'")
    from shoal.cli.explain import explain_strategy

    explain_strategy(EXPLAINED, as_json=False, world=None)

    console.rule("2. shoal verify, and 3. shoal train, on two tasks and several strategies")
    from shoal.proof.certify import verify

    table = Table(title="The same model, trained in different ways", title_justify="left")
    for column in ("strategy", "proof", "validation", "ms/step", "MB/step"):
        table.add_column(column, justify="right" if "/" in column else "left")
    sound = True
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder, console.status("...") as status:
        for job, strategies in COMPARED.items():
            table.add_section()
            table.add_row(f"[bold]{job}[/bold]")
            for number, text in enumerate(strategies):
                strategy = parse(text)
                proof = "(the reference)"
                if strategy.world > 1:
                    status.update(f"verify {job} under {strategy}")
                    certificate = verify(job, strategy, steps=STEPS_PROVEN)
                    sound &= certificate.passed
                    verdict = "passed" if certificate.passed else "FAILED"
                    proof = f"{certificate.contract}: {certificate.max_rel_diff:.0e} {verdict}"
                status.update(f"train {job} under {strategy}")
                options = TrainOptions(
                    job=job,
                    strategy=str(strategy),
                    folder=str(Path(folder) / f"{job}-{number}"),
                    stop_at_target=False,
                    gate=False,
                )
                outcome = run_ranks(train_run, options.to_json(), ranks=strategy.world)[0]
                metrics = "  ".join(f"{name} {value:.3f}" for name, value in list(outcome["metrics"].items())[-1:])
                sent = outcome["sent_bytes"] / 1e6
                table.add_row(str(strategy), proof, metrics, f"{1000 * outcome['step_s']:.1f}", f"{sent:.3f}")
                console.print(f"  {job}  {strategy}: {proof}; {metrics}", style="dim")
    console.print(table)
    console.print(
        "At this size the work is too small to gain from two ranks: the table shows that the numbers stay the same. "
        f"benchmarks/train.py measures speed.\nDone in {time.perf_counter() - started:.0f} s. "
        "Next: shoal train language --size small --strategy 'dp(2)', or shoal train examples/gpt.py."
    )
    return 0 if sound else 1
