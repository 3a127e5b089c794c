"""Loads a Job from its command-line name: a built-in name, or the user's Python file. A file is imported under
a private name with its folder on the path, so it may import its neighbours; an error in it is reported with the
line of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.job import names
from shoal.job.errors import JobError, did_you_mean
from shoal.job.job import Job
from shoal.job.space import is_point, job_at

OBJECTS: dict[str, Job] = {}
"""Jobs of this process by the names that `named` gave them; forks of it have them too."""


def named(job: Job) -> str:
    """A name under which `load_job` finds a job of this process."""
    name = f"object:{job.name}"
    OBJECTS[name] = job
    return name


def with_callbacks(job: str | Job, callbacks: Sequence[Any], *, size: str | None = None) -> Job:
    """A job that also has these callbacks."""
    found = load_job(job, size=size) if isinstance(job, str) else job
    return replace(found, callbacks=(*found.callbacks, *callbacks))


def load_job(spec: str, *, size: str | None = None) -> Job:
    """The job that a text names: `language`, `image:resnet:small`, `gpt.py` or `gpt.py:name`.

    `mine.py:space?lr=0.01` is a point of a search space. `size` is the size of a built-in job whose name gives none.
    """
    if not spec.strip():
        raise JobError(f"no job was named; give a Python file, or one of {', '.join(names.TASKS)}")
    if spec in OBJECTS:
        return OBJECTS[spec]
    if is_point(spec):
        return job_at(spec, size=size)
    if names.is_file(spec):
        if size is not None:
            raise JobError(f"size {size!r} was given, but {spec!r} is a file: sizes belong to the built-in jobs")
        path, name = names.split_file(spec)
        return load_file(path, name=name)
    chosen = names.parse_name(spec, size=size)
    if chosen.task == "language":
        from shoal.job.tasks.language import language

        return language(chosen.size)
    from shoal.job.tasks.image import image

    return image(chosen.network, chosen.size)


def load_file(path: str | Path, *, name: str | None = None) -> Job:
    """The job in a Python file: the attribute `job` (or `name`), a Job or a function without arguments that returns
    one.
    """
    wanted = name or "job"
    found, guarded = load_attribute(path, wanted, write="{wanted} = Job(...), or def {wanted}() -> Job")
    if callable(found) and not isinstance(found, (Job, type)):
        found = guarded(f"calling {wanted}()", found)
    if not isinstance(found, Job):
        raise JobError(
            f"{wanted!r} in {Path(path).expanduser().resolve()} is a {type(found).__name__}, but must be a Job, or a "
            "function that returns one"
        )
    return found


Guarded = Callable[[str, Callable[[], Any]], Any]


def load_attribute(path: str | Path, wanted: str, *, write: str) -> tuple[Any, Guarded]:
    """What a Python file defines under a name, and a way to call it: `guarded(doing, call)` finds the neighbours of the
    file, and names its line where it fails. `write`: what a file without it should say."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise JobError(_missing(file))
    if file.suffix != ".py":
        raise JobError(f"{file} is not a Python file; a job file ends in .py")
    file = file.resolve()

    def guarded(doing: str, call: Callable[[], Any]) -> Any:
        with _beside(file):
            return _guard(file, doing, call)

    with _beside(file):
        module = _import(file)
    if not hasattr(module, wanted):
        jobs = sorted(key for key, value in vars(module).items() if isinstance(value, Job))
        hint = (
            f" It does define {', '.join(jobs)}: load {file.name}:{jobs[0]}"
            if jobs
            else did_you_mean(wanted, vars(module))
        )
        raise JobError(f"{file} does not define {wanted!r}; write {write.format(wanted=wanted)}.{hint}")
    return getattr(module, wanted), guarded


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[None]:
    """The file's folder is on the path."""
    folder = str(file.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _import(file: Path) -> ModuleType:
    private = f"_shoal_job_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(private, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(private)
    # Dataclasses and annotations in the file look their module up by name.
    sys.modules[private] = module
    try:
        _guard(file, "loading it", lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    except BaseException:
        if before is None:
            del sys.modules[private]
        else:
            sys.modules[private] = before
        raise
    return module


def _guard(file: Path, doing: str, call: Callable[[], Any]) -> Any:
    """Run the user's code; turn what it raises into an error that names the line of their file."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        where, source = _place(file, error)
        if isinstance(error, JobError):
            what = str(error)
        else:
            raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            what = f"{doing} raised {raised}{_right_name(error)}"
        raise JobError(f"{where}: {what}" + (f"\n    {source}" if source else "")) from error


def _right_name(error: BaseException) -> str:
    """What the fields of a Job are called, where another name was given."""
    given = re.search(r"Job\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if given is None:
        return ""
    known = [each.name for each in fields(Job)]
    other = {"batch_size": "global_batch", "epochs": "steps", "max_steps": "steps", "dataset": "train", "data": "train"}
    name = other.get(given[1])
    near = f" Did you mean {name!r}?" if name else did_you_mean(given[1], known)
    return f".{near} A Job has {', '.join(known)}"


def _place(file: Path, error: BaseException) -> tuple[str, str]:
    """(file:line, its text) of the last line of the user's file that was running, or of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == file:
        return f"{file}:{error.lineno}", (error.text or "").strip()
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return (f"{file}:{own[-1].lineno}", (own[-1].line or "").strip()) if own else (str(file), "")


def _missing(file: Path) -> str:
    """Reports a missing file, with the Python file of the most similar name nearby."""
    if file.is_dir():
        return f"{file} is a folder, but a job is a Python file"
    folder = file.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    near = {path.name: path for place in (Path.cwd(), folder) for path in sorted(place.glob("*.py"))}
    hint = did_you_mean(file.name, near)
    if hint:
        nearest = next(path for name, path in near.items() if repr(name) in hint)
        return f"there is no file {file}. Did you mean {nearest}?"
    if near and file.suffix == ".py":
        return f"there is no file {file}. There is: {', '.join(str(path) for path in list(near.values())[:5])}"
    return f"there is no file {file}; a job is a Python file, or one of {', '.join(names.TASKS)}"
