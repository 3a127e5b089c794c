"""The `shoal` command: runs a verb, and turns errors that a user can mend into sentences."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator

import typer

from shoal.api.call import refusals_name_options
from shoal.cli import comparing_verbs, doctor, running_verbs, searching_verbs, submit, verbs  # noqa: F401 (they register themselves)
from shoal.cli.app import app


def run() -> None:
    """The `shoal` command. Errors that a user can mend are shown as sentences, not as tracebacks."""
    try:
        if sys.argv[1:2] == ["compare"]:
            sys.argv[1:] = comparing_verbs.with_repeated(sys.argv[1:])
        _start_early(sys.argv[1:])
        # Typer turns an interrupt into a status, which it returns.
        few = _few_cycles() if sys.argv[1:2] == ["plan"] else contextlib.nullcontext()
        with few, refusals_name_options():
            status = app(standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        # stdout was closed (`| head`): discard what is still buffered.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(1)
    except Exception as error:
        sys.exit(_print_error(error))
    if status == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Everything is ending; another Ctrl-C must not change the status.
        print("stopped", file=sys.stderr)
    sys.exit(status or 0)


@contextlib.contextmanager
def _few_cycles() -> Iterator[None]:
    """For what is over before there are cycles worth freeing: to look for them takes a tenth of a plan's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


RUNNING = ("train", "verify", "calibrate", "evaluate", "export", "plan", "demo", "compare", "doctor", "search")
"""Verbs that may start ranks."""


def _start_early(words: list[str]) -> None:
    """Ranks are forked off a process that takes a second to load; it loads while this one reads the command line."""
    if words[:1] and words[0] in RUNNING:
        from shoal.launch.engines import adopt, refuse_several

        adopt(os.environ)
        if words[0] not in ("train", "calibrate") and "--help" not in words:
            refuse_several(words[0], os.environ)
    if words[:1] in (["train"], ["verify"]) and "--help" not in words and "RANK" not in os.environ:
        from shoal.launch import warm_up

        warm_up()


def _print_error(error: Exception) -> int:
    """Prints the error; the exit status: 2 for what a user can mend, 1 for a rank that failed."""
    shown = getattr(error, "format_message", None)
    if shown is not None or isinstance(error, (ValueError, FileNotFoundError)):
        # All ranks of a launcher raise the same error: print it once per host.
        if "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"shoal: {shown() if shown is not None else error}", file=sys.stderr)
        return 2
    if type(error).__module__ == "shoal.launch.failure":
        # One rank's failure ends all; its own traceback is the one that helps.
        if not error.for_user and error.traceback_text:  # type: ignore[attr-defined]
            print(error.traceback_text, file=sys.stderr)  # type: ignore[attr-defined]
        print(f"shoal: {error}", file=sys.stderr)
        return 1
    raise error


if __name__ == "__main__":
    run()
