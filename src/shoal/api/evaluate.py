"""`shoal.evaluate`: the validation metrics of a trained model, on ranks of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.call import checked_keywords, strategy_of
from shoal.common.printed import PrintedTable
from shoal.runtime.options import JobOptions
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


@dataclass(frozen=True, kw_only=True, repr=False)
class JointEvaluation(PrintedTable):
    """The validation metrics of several models, alone and together."""

    alone: list[dict[str, float]]
    mean_alone: dict[str, float]
    together: dict[str, float]
    combined: str
    """What they predict together: the mean of probabilities, or of outputs that are none."""

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        names = list(self.together)
        rows = [[f"model {number}", *(f"{row[name]:.6g}" for name in names)] for number, row in enumerate(self.alone)]
        rows += [
            [what, *(f"{row[name]:.6g}" for name in names)]
            for what, row in (("mean of models", self.mean_alone), ("together", self.together))
        ]
        return f"{len(self.alone)} models, together by the {self.combined}", ["", *names], rows


@checked_keywords
def evaluate_together(runs: Sequence[str | Path | Run], *, job: str | Job | None = None) -> JointEvaluation:
    """Computes the validation metrics of several trained models alone, and of the mean of their predictions.

    Args:
        runs: Runs, their folders, or checkpoints of one run (a snapshot ensemble), all of one job.
        job: The job, if its file was moved since the runs, or if they were of a Job object.

    Returns:
        The metrics of each model, their mean, and those of all together.

    Example:
        shoal.evaluate_together(["runs/a", "runs/b"]).together
    """
    from shoal.launch import run_ranks
    from shoal.training.entry import judge_members

    if job is not None and not isinstance(job, str):
        from shoal.job.load import named
        from shoal.launch.fork_of_caller import forking_this_process

        name = named(job)
        with forking_this_process():
            return evaluate_together(runs, job=name)
    folders = [str(run.folder if isinstance(run, Run) else run) for run in runs]
    if not folders:
        raise ValueError("evaluate_together was given no runs; give the folders of some, or of their checkpoints")
    first = Path(folders[0])
    arguments = read_json((first.parent.parent if first.name.startswith("step-") else first) / RUN).get("arguments")
    known = {each.name for each in fields(JobOptions)}
    of_job = {name: value for name, value in (arguments or {}).items() if name in known and name != "start_from"}
    asked = {**of_job, **({"job": job} if job is not None else {})}
    found = run_ranks(judge_members, {"job": asked, "members": folders, "student": None}, ranks=1)[0]
    if not found:
        raise ValueError(f"the job of {folders[0]} has no validation data; give it some: Job(..., validation=...)")
    return JointEvaluation(**found)


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
