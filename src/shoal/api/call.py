"""What the functions of the API share: refusals of wrong keywords, jobs and strategies in every form, printing."""

from __future__ import annotations

import functools
import html
import inspect
from collections.abc import Callable, Sequence
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
        return function(*args, **kwargs)

    return checked


def strategy_of(given: str | Strategy | Term) -> Strategy:
    """A strategy from its text, its terms or itself."""
    return parse(given) if isinstance(given, str) else as_strategy(given)


def job_of(given: str | Job, *, size: str | None = None) -> Job:
    """A job from its file, its built-in name or itself."""
    from shoal.job import Job, load_job

    if isinstance(given, Job):
        return given
    if not isinstance(given, str):
        raise WrongOption(
            f"a job was expected, not a {type(given).__name__}; give a shoal.Job, a Python file that defines one, or "
            "the name of a built-in one"
        )
    return load_job(given, size=size)


class PrintedTable:
    """A result that prints as a title and a table, in a terminal and in a notebook."""

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """(title, heads, rows)"""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, heads, rows = self._table()
        lines = [list(heads), *(list(row) for row in rows)]
        wide = [max(len(line[place]) for line in lines) for place in range(len(heads))]
        return "\n".join([title, *(
            "  " + "  ".join(cell.ljust(room) for cell, room in zip(line, wide, strict=True)).rstrip() for line in lines
        )])  # fmt: skip

    def _repr_html_(self) -> str:
        title, heads, rows = self._table()

        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in rows)
        return f"<p>{html.escape(title)}</p><table>{line(heads, 'th')}{body}</table>"
