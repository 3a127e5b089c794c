"""The names of the built-in jobs: tasks, networks and sizes, and how a text such as `image:resnet:small` is
read. Pure Python, so that a command line can list and check them without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.job.errors import JobError, did_you_mean

TASKS = ("language", "image")
NETWORKS = {"language": ("gpt",), "image": ("vgg", "resnet")}
SIZES = ("tiny", "small")
SHAPES = {
    "gpt2-medium": ("language", "gpt"),
    "vgg16": ("image", "vgg"),
    "resnet50": ("image", "resnet"),
}
"""Published sizes, for users who have the hardware; each belongs to one network."""

DEFAULT_SIZE = "tiny"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobName:
    """A built-in job, fully named."""

    task: str
    network: str
    size: str

    def __str__(self) -> str:
        return f"{self.task}:{self.network}:{self.size}"


def all_words() -> tuple[str, ...]:
    """Every word that can occur in the name of a built-in job."""
    networks = tuple(network for task in TASKS for network in NETWORKS[task])
    return (*TASKS, *networks, *SIZES, *SHAPES)


def is_file(spec: str) -> bool:
    """Whether a text names a Python file rather than a built-in job."""
    head = spec.partition("?")[0]
    return split_file(head)[0].endswith(".py") or "/" in head or "\\" in head


def split_file(spec: str) -> tuple[str, str | None]:
    """`gpt.py` -> ("gpt.py", None); `gpt.py:name` -> ("gpt.py", "name"). A drive letter's colon is left
    alone.
    """
    spec = spec.partition("?")[0]
    if not spec.endswith(".py"):
        path, colon, name = spec.rpartition(":")
        if colon and path.endswith(".py"):
            return path, name
    return spec, None


def parse_name(spec: str, *, size: str | None = None) -> JobName:
    """The built-in job that a text names, its parts in any order. `size` is used if the text gives none. Values of a
    point of a search space (`image?lr=0.1`) are left aside."""
    spec = spec.partition("?")[0]
    words = [word.strip().lower() for word in spec.split(":")]
    meant: dict[str, str] = {}
    for word in words:
        for what, value in _meaning(word, spec).items():
            if meant.setdefault(what, value) != value:
                raise JobError(f"the job {spec!r} names two different {what}s, {meant[what]!r} and {value!r}; keep one")
    if "task" not in meant:
        raise JobError(f"the job {spec!r} names no task; write one of {', '.join(f'{task}:{spec}' for task in TASKS)}")
    if "size" not in meant and size is not None:
        given = size.strip().lower()
        if given not in SIZES and given not in SHAPES:
            valid = (*SIZES, *(shape for shape, (task, _) in SHAPES.items() if task == meant["task"]))
            raise JobError(f"unknown size {size!r}; the sizes are {', '.join(valid)}.{did_you_mean(given, valid)}")
        for what, value in _meaning(given, spec).items():
            if meant.setdefault(what, value) != value:
                raise JobError(
                    f"size {size!r} belongs to the {what} {value!r}, "
                    f"but the job {spec!r} is of the {what} {meant[what]!r}"
                )
    return JobName(
        task=meant["task"],
        network=meant.get("network", NETWORKS[meant["task"]][0]),
        size=meant.get("size", DEFAULT_SIZE),
    )


def _meaning(word: str, spec: str) -> dict[str, str]:
    if word in TASKS:
        return {"task": word}
    if word in SIZES:
        return {"size": word}
    if word in SHAPES:
        task, network = SHAPES[word]
        return {"task": task, "network": network, "size": word}
    for task in TASKS:
        if word in NETWORKS[task]:
            return {"task": task, "network": word}
    where = f" in {spec!r}" if word != spec else ""
    networks = ", ".join(network for task in TASKS for network in NETWORKS[task])
    raise JobError(
        f"unknown job {word!r}{where}. A job is a Python file (gpt.py), or one of {', '.join(TASKS)}, with a "
        f"network ({networks}) and a size ({', '.join((*SIZES, *SHAPES))}) behind colons, as in "
        f"image:resnet:small.{did_you_mean(word, all_words())}"
    )
