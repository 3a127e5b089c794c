"""Every command of the documentation runs, as a reader would type it, in a folder with the files that it names.

Long trainings are cut to four steps and searches to two trials; everything else is as printed. A command that is not
run is listed with the reason; a line with [brackets] or CAPITALS is a synopsis.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cli import readers_folder
from cli.command import Place
from cli.test_docs import PAGES, code_lines, commands

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NOT_RUN = {
    r"^calibrate": "needs an idle machine, or rows of a cluster: test_calibrate_command.py, tests/calibration",
    r"--storage postgresql": "needs a database server: tests/searching",
    r"--on slurm .*--send": "needs Slurm: tests/launch/test_engines.py",
    r"^plan.*--cluster this": "needs a calibrated machine: tests/cli/test_calibrated.py",
    r"^compare .*torch-": "frameworks are trained in tests/comparison",
    r"^(compare --(quick|preset survey)|doctor( --json)?$)": "a minute or more: tests/comparison, tests/api",
    r"mixtral.py": "a file of the reader's own",
    r"runs/first --to hf-folder": "needs a Hugging Face model: tests/export",
    r"^train (language|image)(?!:tiny)": "the built-in tasks of normal size train for minutes",
    r"^search image": "trains for minutes: tests/searching",
}
"""Patterns of commands that are not run, each with the reason and the tests that cover it."""

SHORTER = {"train": ("--steps", "4"), "verify": ("--steps", "2"), "search": ("--trials", "2")}


def typed(page: Path) -> list[str]:
    """The commands of a page's code blocks, in their order, without synopses."""
    found = []
    text = page.read_text(encoding="utf-8")
    for line in commands("\n".join(f"    {each}" for each in code_lines(text)), r"shoal (?=[a-z])"):
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition("#")[0])
        synopsis = "[" in bare or "..." in bare or re.search(r"(?<![\w./=-])[A-Z]{2,}\b|\b[A-Z]\b|\|", bare)
        if not synopsis and len(bare.split()) > 1:
            found.append(line)
    return list(dict.fromkeys(found))


def why_not(words: list[str]) -> str | None:
    line = " ".join(words)
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), None)


def shortened(words: list[str], page: str) -> list[str]:
    """The same command with fewer steps or trials, over what other pages wrote, in a shared folder of its own."""
    verb = words[0]
    if verb == "export":
        words = [*words, "--overwrite"]
    if verb in SHORTER and "--" not in words:
        option, value = SHORTER[verb]
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words = [*words, option, value]
    return [f"shared/{page}/{Path(word).name}" if word.startswith("/shared/") else word for word in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A reader's folder in which two jobs were trained and exported."""
    place = Place(folder=tmp_path_factory.mktemp("reader"))
    readers_folder.fill(place.folder)
    for name, strategy in (("first", "dp(2)"), ("second", "dp(2, zero=1)"), ("NAME", "dp(2)")):
        words = ("train", "mine.py", "--strategy", strategy, "--steps", "4", "--folder", f"runs/{name}")
        done = place.shoal(*words, timeout_s=100)
        assert done.returncode == 0, done.stderr
    for form in ("model.safetensors", "checkpoints/step-1000"):
        how = ("--to", form) if "." in form else ("--to", "dcp", "--out", form)
        done = place.shoal("export", "runs/first", *how, timeout_s=100)
        assert done.returncode == 0, done.stderr
    return place


PAGES_WITH_COMMANDS = [page for page in PAGES if typed(page)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_they_are_printed(page: Path, folder: Place) -> None:
    failed = []
    for line in typed(page):
        words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
        if why_not(words):
            continue
        done = folder.shoal(*shortened(words, page.stem), timeout_s=200)
        if done.returncode:
            failed.append(f"{line}\n{done.stdout[-800:]}{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)


def test_what_is_not_run_is_still_in_the_documentation() -> None:
    lines = [" ".join(shlex.split(line, comments=True)[1:]) for page in PAGES for line in typed(page)]
    for pattern, reason in NOT_RUN.items():
        assert any(re.search(pattern, line) for line in lines), (pattern, reason)
