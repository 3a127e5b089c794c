"""What is submitted: a job, its strategy, and the nodes it runs on."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path


class CannotSubmit(ValueError):
    """What was asked for cannot be submitted; the message says why and what would work."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A training run on the nodes of a cluster."""

    job: str
    strategy: str
    world: int
    nodes: int
    folder: str
    """The run's folder, on a file system of all nodes."""
    name: str
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    minutes: int | None = None
    """The time limit."""
    retries: int = 3
    """How often the run goes on after a failure, where the engine restarts it."""
    options: tuple[str, ...] = ()
    """Further options of `shoal train`."""

    def __post_init__(self) -> None:
        if self.world % self.nodes:
            raise CannotSubmit(
                f"--nodes {self.nodes}: the strategy has {self.world} ranks, which {self.nodes} nodes cannot share "
                "evenly"
            )
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", self.name):
            raise CannotSubmit(
                f"--name {self.name!r}: expected lower-case letters, digits and dashes, at most 52, as "
                "Kubernetes wants them"
            )
        own = [word for word in self.options if word.split("=")[0] in ("--folder", "--go-on", "--strategy", "-s")]
        if own:
            raise CannotSubmit(f"{own[0]} is written into the command by `shoal submit`; leave it out after --")

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.world // self.nodes

    @property
    def train(self) -> list[str]:
        """The words after `shoal`: a command that starts the run and goes on with it."""
        words = ["train", self.job, "--strategy", self.strategy, "--folder", self.folder, "--go-on"]
        return [*words, *self.options]


def name_of(job: str) -> str:
    """A name for a job's run: of its file or its built-in name."""
    stem = Path(job.partition(":")[0]).stem if ".py" in job else job
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "run"


def quoted(words: list[str]) -> str:
    """Words as a shell reads them."""
    return " ".join(shlex.quote(word) for word in words)
