"""The one logger of Shoal. It is silent until a program configures `logging`:

    logging.basicConfig(); logging.getLogger("shoal").setLevel("INFO")

Steps are logged at DEBUG; notes, checkpoints and metrics at INFO; warnings at WARNING.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("shoal")
logger.addHandler(logging.NullHandler())

LEVELS = {"step": logging.DEBUG, "warning": logging.WARNING, "lost": logging.WARNING, "restored": logging.WARNING}
"""Of what ranks report; everything else is INFO."""


def log_message(message: dict[str, Any]) -> None:
    """Logs what a rank reports."""
    event = message.get("event", "")
    rest = {name: value for name, value in message.items() if name not in ("event", "text")}
    said = message.get("text") or ", ".join(f"{name} {value}" for name, value in rest.items())
    logger.log(LEVELS.get(event, logging.INFO), "%s: %s", event, said)


def log_progress(text: str) -> None:
    """Logs what is being done."""
    logger.info("%s", text)
