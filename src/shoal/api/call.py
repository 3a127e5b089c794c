"""What the functions of the API share: refusals in the words of the caller, jobs and strategies in every form."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from shoal.common.suggest import did_you_mean
from shoal.runtime.options import WrongOption
from shoal.strategy import Strategy, Term, as_strategy, parse

if TYPE_CHECKING:
    from shoal.job import Job

Given = ParamSpec("Given")
Found = TypeVar("Found")


def checked_keywords(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, with a refusal of unknown keywords that proposes the nearest one and lists all."""
    parameters = inspect.signature(function).parameters
    known = [name for name, each in parameters.items() if each.kind is not inspect.Parameter.POSITIONAL_ONLY]

    @functools.wraps(function)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        for name in kwargs:
            if name not in known:
                raise WrongOption(
                    f"shoal.{function.__name__}: no option {name!r}{did_you_mean(name, known)}; "
                    f"it takes {', '.join(known)}"
                )
        with refusals_name_keywords():
            return function(*args, **kwargs)

    return checked


_IN_A_SHELL = contextvars.ContextVar("_IN_A_SHELL", default=False)
_OPTION = re.compile(r"(?<![\w`-])--([a-z][a-z-]*)(?: (?=[^\s:;,.)])(?=(?:'[^']*'|\S+)(?:[:;,]| cannot\b)))?")
"""An option, with the space before its value where one follows."""


@contextlib.contextmanager
def refusals_name_options() -> Iterator[None]:
    """Refusals name options of the command line: the caller is `shoal` itself."""
    before = _IN_A_SHELL.set(True)
    try:
        yield
    finally:
        _IN_A_SHELL.reset(before)


def in_keywords(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """The function, with refusals that name its keywords."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        with refusals_name_keywords():
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def refusals_name_keywords() -> Iterator[None]:
    """Refusals are written in the words of the command line. To a caller in Python `--kwh-price 2: ...` is
    `kwh_price=2: ...`."""
    try:
        yield
    except ValueError as error:
        if not _IN_A_SHELL.get() and len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (_OPTION.sub(lambda found: found[1].replace("-", "_") + "=", error.args[0]),)
        raise


def strategy_of(given: str | Strategy | Term) -> Strategy:
    """A strategy from its text, its terms or itself."""
    return parse(given) if isinstance(given, str) else as_strategy(given)


def job_of(given: str | Path | Job, *, size: str | None = None) -> Job:
    """A job from its file, its built-in name or itself."""
    from shoal.job import Job, load_job

    given = str(given) if isinstance(given, Path) else given

    if isinstance(given, Job):
        return given
    if not isinstance(given, str):
        raise WrongOption(
            f"a job was expected, not a {type(given).__name__}; give a shoal.Job, a Python file that defines one, or "
            "the name of a built-in one"
        )
    return load_job(given, size=size)
