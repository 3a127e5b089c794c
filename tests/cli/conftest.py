"""Two ways to call the command: `place.shoal(...)` as a process, and `shoal(...)` inside the test's own.

The second shares one fork server among all tests: a training of a few steps takes a fraction of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.command import Place
from shoal.cli.main import run


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str


Shoal = Callable[..., Done]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(folder=tmp_path)


@pytest.fixture
def shoal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shoal:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["shoal", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run()
        said = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, said.out, said.err)

    return call
