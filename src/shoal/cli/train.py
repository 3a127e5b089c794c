"""`shoal train`: everything is checked before ranks start, then they run and their progress is shown live.

Started by torchrun (or any launcher that sets RANK and WORLD_SIZE) it becomes one rank of the job instead.
Elsewhere this process imports no torch: also the check is done by a fork of the server that has it.
"""

from __future__ import annotations

import sys

from shoal.api.train import TrainOptions, as_one_rank, is_launched, ready_to_train, train_locally
from shoal.cli.output import echoed, emitter
from shoal.cli.progress import LiveProgress, plain_lines, summary


def train_command(
    options: TrainOptions, *, ranks: int | None = None, hang_after_s: float = 300.0, as_json: bool = False
) -> int:
    """Trains, prints, and returns the exit status. `ranks`: how many there must be."""
    written = options.strategy
    options, strategy = ready_to_train(options, ranks=ranks)
    with emitter(summary, as_json=as_json) as show:
        if is_launched():
            as_one_rank(options, strategy.world, hang_after_s=hang_after_s, on_message=plain_lines(), show=show)
        bar = LiveProgress(str(strategy)) if sys.stderr.isatty() and not as_json else None
        try:
            listen = bar.message if bar else plain_lines()
            outcome = train_locally(options, strategy.world, hang_after_s=hang_after_s, on_message=listen)
        finally:
            if bar:
                bar.close()
        show(outcome if as_json else {**outcome, "strategy": echoed(outcome["strategy"], written)})
    return 0 if outcome["status"] == "finished" else 130
