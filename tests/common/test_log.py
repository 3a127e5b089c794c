"""What a person sees of a training from Python: lines where one watches, nothing where a program configures logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.common import log

STEP = {"event": "step", "step": 3, "steps": 10, "loss": 2.5, "step_s": 0.02}


@contextmanager
def prompt() -> Iterator[None]:
    """As at Python's prompt, with logging as it is before anybody configures it (pytest does, while a test runs)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "ps1", ">>> ", raising=False)
        patch.setattr(logging.getLogger(), "handlers", [])
        patch.setattr(log, "_printed_s", [float("-inf")])
        yield


def test_who_watches_sees_a_line_in_some_seconds_and_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with prompt():
        for step in (3, 4, 10):
            log.log_message({**STEP, "step": step})
    assert capsys.readouterr().err == "step 3/10  loss 2.5000  20 ms\nstep 10/10  loss 2.5000  20 ms\n"


def test_progress_of_other_work_is_seen_and_a_message_without_a_loss_is_no_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with prompt():
        log.log_progress("3 serial steps in float64")
        log.log_message({"event": "step", "text": "a trial"})
    assert capsys.readouterr().err == "3 serial steps in float64\n"


def test_a_program_that_configures_logging_gets_records_instead(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with prompt(), caplog.at_level(logging.DEBUG, logger="shoal"):
        logging.getLogger().addHandler(caplog.handler)
        log.log_message(STEP)
    assert "loss 2.5" in caplog.text
    assert "step 3/10" not in capsys.readouterr().err


def test_nobody_watches_a_program_in_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    with prompt(), pytest.MonkeyPatch.context() as patch:
        patch.delattr(sys, "ps1")
        log.log_message(STEP)
    assert capsys.readouterr().err == ""
