"""`shoal.submit`: a run on somebody's cluster, as a script, a manifest or a driver that can be read and sent."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.api.call import checked_keywords, strategy_of
from shoal.api.known import require_known
from shoal.launch.submit import kubernetes, ray, slurm
from shoal.launch.submit.request import CannotSubmit, Request, name_of
from shoal.parallel.runnable import require_runnable
from shoal.strategy import Strategy, Term, ensemble, require_legal
from shoal.strategy.members import member_strategy

ENGINES = {"slurm": "sbatch", "k8s": "kubectl", "ray": "ray"}
"""Where a run can be submitted, and the program of each."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A run that can be sent: `text` is the sbatch script, the manifest or the driver."""

    engine: str
    text: str

    def send(self) -> str:
        """Submits it by the engine's own program; what that printed. A driver of Ray runs until the end of the run."""
        program = ENGINES[self.engine]
        if shutil.which(program) is None:
            raise CannotSubmit(f"--send: {program} is not installed here; send the text from a machine that has it")
        words = {"slurm": ["sbatch"], "k8s": ["kubectl", "apply", "-f", "-"], "ray": [sys.executable, "-"]}[self.engine]
        done = subprocess.run(words, input=self.text, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise CannotSubmit(f"--send: {words[0]} failed with exit status {done.returncode}; its message is above")
        return done.stdout.strip()


@checked_keywords
def submit(
    job: str | Path,
    strategy: str | Strategy | Term,
    *,
    on: str,
    nodes: int,
    folder: str | None = None,
    name: str | None = None,
    cpus_per_rank: int = 1,
    gpus_per_node: int = 0,
    minutes: int | None = None,
    retries: int = 3,
    sbatch: Sequence[str] = (),
    kind: str = "trainjob",
    image: str | None = None,
    claim: str = "shared",
    mount: str = "/shared",
    secret: str | None = None,
    options: Sequence[str] = (),
) -> Submission:
    """Writes what an engine needs to run a job under a strategy. Nothing is sent before `.send()`.

    Args:
        job: A file that defines a Job, as the nodes find it, or a built-in name.
        strategy: Text or terms; its ranks are shared evenly by the nodes.
        on: slurm, k8s or ray.
        nodes: Number of nodes.
        folder: The run's folder, on a file system of all nodes. None: runs/NAME, under k8s MOUNT/runs/NAME.
        name: Name of the run. None: the job's.
        cpus_per_rank: Cores, and threads, of a rank.
        gpus_per_node: GPUs of a node.
        minutes: Time limit. None: the engine's own.
        retries: Restarts after failures, under k8s (job) and ray.
        sbatch: Further options of sbatch, such as `--partition=gpu`.
        kind: Under k8s: trainjob (Kubeflow Trainer v2) or job (an Indexed Job of the core API).
        image: Under k8s: the container image, with Shoal and the job's file.
        claim: Under k8s: the persistent volume claim that all pods mount.
        mount: Under k8s: where they mount it.
        secret: Under k8s: the Secret whose key `token` the ranks share. None: NAME-token.
        options: Further options of `shoal train`, as words.

    Returns:
        The text, and `.send()`.

    Raises:
        CannotSubmit: Something that was given does not fit; the text says what would.

    Example:
        print(shoal.submit("gpt.py", "dp(8, zero=3)", on="slurm", nodes=2).text)
    """
    chosen = strategy_of(strategy)
    require_legal(chosen)
    require_runnable(chosen)
    if (members := chosen.term(ensemble)) is not None:
        raise CannotSubmit(
            f"{members}: members are jobs of their own on a cluster; submit {member_strategy(chosen)} {members.n} "
            "times, each with another --seed, and judge them by shoal.evaluate_together"
        )
    job = str(job)
    # A file may lie on the nodes only; a name is checked here.
    if not job.partition(":")[0].endswith(".py"):
        require_known(job, None)
    if on not in ENGINES:
        raise CannotSubmit(f"--on {on!r}: expected one of {', '.join(ENGINES)}")
    called = name or name_of(job)
    place = folder or (f"{mount.rstrip('/')}/runs/{called}" if on == "k8s" else f"runs/{called}")
    if on == "ray":
        place = str(Path(place).absolute())
    request = Request(
        job=job,
        strategy=str(chosen),
        world=chosen.world,
        nodes=nodes,
        folder=place,
        name=called,
        cpus_per_rank=cpus_per_rank,
        gpus_per_node=gpus_per_node,
        minutes=minutes,
        retries=retries,
        options=tuple(options),
    )
    if on == "slurm":
        return Submission(engine=on, text=slurm.script(request, sbatch=tuple(sbatch)))
    if on == "k8s":
        text = kubernetes.manifest(request, kind=kind, image=image, claim=claim, mount=mount, secret=secret)
        return Submission(engine=on, text=text)
    return Submission(engine=on, text=ray.driver(request, _settings(request)))


def _settings(request: Request) -> dict[str, Any]:
    """The options of `train_as_rank` that the words of a command line mean."""
    from shoal.training.options import TrainOptions

    given: dict[str, Any] = {"job": request.job, "strategy": request.strategy, "folder": request.folder, "go_on": True}
    if Path(request.job.partition(":")[0]).suffix == ".py":
        given["job"] = str(Path(request.job).absolute())
    words = list(request.options)
    while words:
        flag = words.pop(0)
        option, equals, value = flag.partition("=")
        key = {"batch": "global_batch"}.get(option.removeprefix("--"), option.removeprefix("--").replace("-", "_"))
        if option == "--no-gate":
            given["gate"] = False
            continue
        if not option.startswith("--") or (not equals and not words):
            raise CannotSubmit(f"{flag!r}: expected options of shoal train with their values")
        value = value if equals else words.pop(0)
        given[key] = int(value) if value.isdecimal() else value
    TrainOptions.from_json(given)
    return given
