"""`shoal.evaluate`: the validation metrics of a trained model, on ranks of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords, strategy_of
from shoal.common.printed import PrintedTable
from shoal.strategy import Strategy, Term, require_legal
from shoal.training.record.run import RUN, Run, read_json

if TYPE_CHECKING:
    from shoal.job import Job


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation(PrintedTable):
    """The validation metrics of one checkpoint."""

    job: str
    step: int
    samples: int
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """What the verb prints with `--json`."""
        return asdict(self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [[name, f"{value:.6g}"] for name, value in self.metrics.items()]
        return f"{self.job}, step {self.step}, {self.samples:,} validation samples", ["metric", "value"], rows


@checked_keywords
def evaluate(
    run: str | Path | Run,
    *,
    strategy: str | Strategy | Term = "serial",
    step: int | None = None,
    ema: bool = False,
    job: str | Job | None = None,
) -> Evaluation:
    """Computes the validation metrics of a trained model.

    Args:
        run: A Run, the folder of one, or of one of its checkpoints.
        strategy: How to spread the model over ranks.
        step: Step of the checkpoint. None: the newest.
        ema: Whether to evaluate the moving average of the weights.
        job: The job, if its file was moved since the run.

    Returns:
        The metrics, with the job, the step and the number of samples.

    Example:
        shoal.evaluate("runs/first").metrics
    """
    from shoal.launch import run_ranks
    from shoal.parallel.runnable import require_runnable
    from shoal.runtime.options import JobOptions
    from shoal.training.evaluate import EvaluateOptions, evaluate_run

    if job is not None and not isinstance(job, str):
        from shoal.job.load import named
        from shoal.launch.fork_of_caller import forking_this_process

        name = named(job)
        with forking_this_process():
            return evaluate(run, strategy=strategy, step=step, ema=ema, job=name)
    given = run.folder if isinstance(run, Run) else Path(run)
    folder = given.parent.parent if given.name.startswith("step-") else given
    arguments = read_json(folder / RUN).get("arguments") or {}
    known = {each.name for each in fields(JobOptions)}
    of_job = {name: value for name, value in arguments.items() if name in known and name != "start_from"}
    chosen = strategy_of(strategy)
    require_legal(chosen)
    require_runnable(chosen)
    options = EvaluateOptions.from_json(
        {**of_job, "run": str(given), "step": step, "ema": ema, "strategy": str(chosen)}
        | ({"job": job} if job is not None else {})
    )
    from shoal.job import names

    if names.is_file(options.job) or not options.job.startswith("object:"):
        outcome = run_ranks(evaluate_run, options.to_json(), ranks=chosen.world)[0]
    else:
        from shoal.launch.fork_of_caller import forking_this_process

        with forking_this_process():  # The run was of a Job object: forks of this process have it.
            outcome = run_ranks(evaluate_run, options.to_json(), ranks=chosen.world)[0]
    return Evaluation(**outcome)
