"""The options of one training run, as `shoal train` and `train_job` give them and every rank receives them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from shoal.runtime.options import JobOptions, WrongOption


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """How to train a job."""

    strategy: str | None = None
    """How to train, for example `dp(2, zero=3)`. None: that of the resumed run, or serial."""
    folder: str | None = None
    """Where the run is recorded. None: that of the resumed run, or a new folder in `runs`."""
    resume: str | None = None
    """A run's folder, or one of its checkpoints, to go on from."""
    go_on: bool = False
    """Whether a run in `folder` is resumed, and started if there is none: one command for a start and for every restart
    by a scheduler."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; 0 writes none. None: four in a run."""
    checkpoint_minutes: float | None = None
    """Minutes between checkpoints, by rank 0's clock, besides those by steps."""
    checkpoint_async: bool = False
    """Whether a thread writes checkpoints from a copy while training goes on."""
    keep: int = 2
    """The newest checkpoints that are kept."""
    keep_best: int = 0
    """Checkpoints of the best evaluations that are kept besides; each is written after its evaluation."""
    weights_only: bool = False
    """Whether checkpoints leave out the optimiser's state. They can be exported and evaluated, not resumed."""
    patience: int | None = None
    """Evaluations without improvement after which the run ends."""
    monitor: str | None = None
    """The validation value that patience and keep_best look at. None: that of the job's target, or the loss."""
    better: str | None = None
    """`lower` or `higher`. None: as the target says; lower for the loss."""
    min_delta: float = 0.0
    """The least change of the monitored value that counts as improvement."""
    trace: bool = False
    """Whether a trace of some steps is written, for Perfetto."""
    log: str | None = None
    """Where else curves are written: `csv`, `wandb`, `mlflow`, or several of them, as "csv, wandb"."""
    prefetch: int = 0
    """Steps whose batches threads or processes read while one computes (`runtime/read_ahead.py`)."""
    loader_threads: int = 1
    """Threads that read ahead, on each rank."""
    loader_processes: int = 0
    """Processes that read ahead instead, on each rank: for Python code that holds the interpreter. Without `prefetch`
    they read as many steps ahead as they are."""
    bucket_mb: float | None = None
    """Gradients travel in buckets of at most this size. None: 8 MB."""
    stop_at_target: bool = True
    """Whether the run ends at the job's target, or goes on to its last step."""
    backend: str | None = None
    """`shoal`, `gloo` or the accelerator's own. None: by the devices here."""
    emulate: str | None = None
    """A slower cluster whose links are emulated (`comm/emulate.py`)."""
    straggler: str | None = None
    """Ranks that are slowed on purpose, such as `rank 2: 3x; random 10%: 5x` (`common/hindrance.py`)."""
    fail: str | None = None
    """Ranks that kill themselves, such as `rank 3 at step 40`."""
    rejoin: bool = False
    """Whether a rank that was killed, and that the others go on without, is started again and joins them."""
    join: str | None = None
    """Further replicas that join while others train, such as `2 at step 40`."""
    gate: bool = True
    """Whether a strategy is checked by two steps in float64 before it first trains this job."""
    lock: str | None = field(default=None, metadata={"set by": "train_locally"})
    """The token by which the run holds its folder. None: rank 0 takes the lock."""
    flops_per_sample: float | None = field(default=None, metadata={"set by": "train_locally"})
    """Floating-point operations of a sample in a step, where they are known (`job/work.py`)."""
    checked: bool = field(default=False, metadata={"set by": "train_locally"})
    """Whether the checkpoint to resume from was found intact just before."""
    job_seed: int = field(default=0, metadata={"set by": "train_locally"})
    """The job's own seed, where no other was given."""
    teachers: str | None = field(default=None, metadata={"set by": "train_locally"})
    """The runs from which a student learns, with commas between them."""
    restored: bool = field(default=False, metadata={"set by": "train_locally"})
    """Whether the run was started again after it had lost a rank (`restored.py`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_from is not None and self.resume is not None and not self.go_on:
            raise WrongOption(
                f"--start-from {self.start_from} gives a new run its weights, and --resume {self.resume} goes on with "
                "those of a run; leave one out"
            )
        if self.better not in (None, "lower", "higher"):
            raise WrongOption(f"--better {self.better}: expected lower or higher")
        if self.keep < 1:
            raise WrongOption("--keep 0: at least 1 checkpoint must be kept; --checkpoint-every 0 writes none")
        if self.loader_threads < 1:
            raise WrongOption("--loader-threads 0: at least 1 thread must read; --prefetch 0 reads nothing ahead")
        if self.bucket_mb == 0:
            raise WrongOption("--bucket-mb 0: expected megabytes, more than 0, such as 8")
        if self.patience == 0:
            raise WrongOption("--patience 0: expected at least 1 evaluation without improvement")

    @property
    def starts_again(self) -> bool:
        """Whether a run that wrote no checkpoint yet may begin anew in its folder."""
        return self.go_on or self.restored

    def recorded(self) -> dict[str, Any]:
        """What the record of the run keeps: all that a user gives."""
        return {each.name: getattr(self, each.name) for each in fields(self) if not each.metadata}
