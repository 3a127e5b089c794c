"""The one logger of Shoal. It is silent until a program configures `logging`:

    logging.basicConfig(); logging.getLogger("shoal").setLevel("INFO")

Steps are logged at DEBUG; notes, checkpoints and metrics at INFO; warnings at WARNING. Where a person watches (in a
notebook, at Python's prompt, in a terminal) and logging is not configured, a line is printed every few seconds instead.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

logger = logging.getLogger("shoal")
_SILENT = logging.NullHandler()
logger.addHandler(_SILENT)

EVERY_S = 5.0
"""Seconds between two lines of a training that somebody watches."""
_printed_s = [float("-inf")]

LEVELS = {"step": logging.DEBUG, "warning": logging.WARNING, "lost": logging.WARNING, "restored": logging.WARNING}
"""Of what ranks report; everything else is INFO."""


def log_message(message: dict[str, Any]) -> None:
    """Logs what a rank reports, or prints it where a person watches."""
    event = message.get("event", "")
    if event == "step" and {"step", "steps", "loss", "step_s"} <= message.keys() and is_watched():
        _print_step(message)
    rest = {name: value for name, value in message.items() if name not in ("event", "text")}
    said = message.get("text") or ", ".join(f"{name} {value}" for name, value in rest.items())
    logger.log(LEVELS.get(event, logging.INFO), "%s: %s", event, said)


def log_progress(text: str) -> None:
    """Logs what is being done, or prints it where a person watches."""
    logger.info("%s", text)
    if is_watched():
        print(text, file=sys.stderr, flush=True)


def is_watched() -> bool:
    """Whether a person reads this process's output and has not configured how Shoal logs."""
    configured = logging.getLogger().handlers or [each for each in logger.handlers if each is not _SILENT]
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return interactive and not configured


def _print_step(message: dict[str, Any]) -> None:
    now = time.monotonic()
    if now - _printed_s[0] >= EVERY_S or message["step"] == message["steps"]:
        _printed_s[0] = now
        at, ms = f"{message['step']}/{message['steps']}", 1e3 * message["step_s"]
        print(f"step {at}  loss {message['loss']:.4f}  {ms:.0f} ms", file=sys.stderr, flush=True)
