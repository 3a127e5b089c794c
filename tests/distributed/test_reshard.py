"""A checkpoint of any exact strategy goes on under any other, as if nothing had happened.

Three steps under one strategy, a checkpoint, three more under another: losses, parameters, optimiser state and buffers
are those of six serial steps, to 1e-10 in float64. The command does the same in float32. Half the pairs of one number
of ranks share a start.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distributed.training_targets import curve
from shoal.launch import run_ranks
from shoal.proof.certify import EXACT
from shoal.proof.compare import GRADIENT
from shoal.strategy import parse

FOLDER = Path(__file__).parent / "jobs"
HALF, STEPS = 3, 6

PAIRS = [
    # job, before, after
    ("uneven:language", "dp(2, zero=3) * tp(2)", 'pp(2, "1f1b", micro=4) * dp(2)'),
    ("uneven:language", "pp(2) * tp(2)", "dp(3)"),
    ("uneven:language", "tp(2, sequence=True)", "cp(2)"),
    ("uneven:language", "serial", "pp(4)"),
    ("uneven:language", 'pp(2, "interleaved", micro=4, chunks=2)', "dp(2)"),
    ("uneven:language", 'pp(2, "zero-bubble", micro=2)', "dp(2, zero=2) * accumulate(2)"),
    ("uneven:language", "tp(2)", "tp(4)"),
    ("uneven:language", "tp(3)", "tp(2)"),
    ("uneven:language", "cp(2)", "tp(2, batch=True)"),
    ("uneven:language_tied", "pp(2) * tp(2)", "dp(2, zero=3)"),
    ("uneven:language_tied", "dp(2, zero=1)", "pp(3, micro=3)"),
    ("plain:moe", "ep(2)", "dp(2, zero=1)"),
    ("plain:moe", "dp(2, zero=3)", "ep(4)"),
    ("plain:moe", "ep(3)", "pp(2) * ep(2)"),
    ("plain:unet", "tp(2)", "tp(3)"),
    ("plain:unet", "dp(2)", "tp(4)"),
    ("plain:unet", "pp(2, micro=2)", "dp(2) * accumulate(2)"),
    ("uneven:image", "tp(2)", "dp(2, zero=1)"),
    ("uneven:image", "dp(2, zero=3)", "tp(2)"),
    ("uneven:image", "tp(4)", "tp(2, batch=True)"),
    ("plain:lstm", "pp(3, micro=3)", "dp(2, zero=3)"),
    ("coupled:complex_layers", "dp(2)", "dp(2, zero=3)"),
    ("coupled:complex_layers", "dp(2, zero=3)", "dp(3, zero=1)"),
    ("coupled:complex_layers", "dp(3, zero=1)", "pp(2, micro=2)"),
    ("coupled:complex_layers", "pp(2, micro=2)", "dp(3, zero=3)"),
    ("growing:language", "dp(2, zero=1)", "pp(2, micro=2)"),
    ("growing:language", "dp(3)", "dp(2, zero=3) * tp(2)"),
    ("uneven:mixtral", "ep(2)", "dp(2, zero=1)"),
    ("uneven:mixtral", "dp(2, zero=3)", "ep(2) * tp(2)"),
    ("uneven:llama_tied", "dp(2, zero=3) * tp(2)", 'pp(2, "1f1b", micro=4) * dp(2)'),
    ("uneven:llama_tied", "pp(2) * tp(2)", 'cp(2, "ulysses")'),
]
HUGGING_FACE = [pair for pair in PAIRS if pair[0] in ("uneven:mixtral", "uneven:llama_tied")]


def spec_of(job: str) -> str:
    file, _, name = job.partition(":")
    return f"{FOLDER / file}.py:{name}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("reshard"))


@cache
def moved(folder: str, hugging_face: bool) -> dict[tuple[str, str, str], dict[str, Any]] | Exception:
    """Pair -> the curve it made, that of the serial run, and each rank's comparison; or why there are none."""
    pairs = HUGGING_FACE if hugging_face else [pair for pair in PAIRS if pair not in HUGGING_FACE]
    try:
        return _moved(pairs, Path(folder))
    except Exception as error:
        return error


def _moved(pairs: list[tuple[str, str, str]], folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    first, second = defaultdict(list), defaultdict(list)
    for number, pair in enumerate(pairs):
        first[parse(pair[1]).world].append((number, pair))
        second[parse(pair[2]).world].append((number, pair))
    of = [folder / f"{pairs[0][0].partition(':')[2]}-{number}" for number in range(len(pairs))]
    found: dict[tuple[str, str, str], dict[str, Any]] = {pair: {} for pair in pairs}
    # Where samples see each other the micro-batches of the second half must be those of the first.
    asked = {"cases": [(spec_of(pair[0]), pair[2]) for pair in pairs], "steps": STEPS, "folder": str(folder)}
    references = run_ranks("distributed.reshard_targets:serial_many", asked, ranks=1)[0]
    for world, some in first.items():
        cases = [(spec_of(pair[0]), pair[1], str(of[number])) for number, pair in some]
        rows = run_ranks("distributed.reshard_targets:save_many", {"cases": cases, "steps": HALF}, ranks=world)
        for (_, pair), losses in zip(some, rows[0], strict=True):
            found[pair]["before"] = losses
    for world, some in second.items():
        cases = [
            (spec_of(pair[0]), pair[2], str(of[number] / f"step-{HALF:08d}"), references[number])
            for number, pair in some
        ]
        rows = run_ranks("distributed.reshard_targets:resume_many", {"cases": cases, "steps": STEPS}, ranks=world)
        for place, (number, pair) in enumerate(some):
            told = json.loads(Path(references[number]).with_suffix(".json").read_text())
            found[pair] |= {"ranks": [row[place] for row in rows], "serial": told}
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "before", "after"),
    [pytest.param(*pair, marks=[pytest.mark.slow] if pair in HUGGING_FACE else []) for pair in PAIRS],
)
def test_a_checkpoint_goes_on_under_another_strategy_as_if_nothing_had_happened(
    job: str, before: str, after: str, folder: str
) -> None:
    hugging_face = (job, before, after) in HUGGING_FACE
    if hugging_face and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    found = moved(folder, hugging_face)
    assert not isinstance(found, Exception), found
    row = found[job, before, after]
    made = [*row["before"], *row["ranks"][0]["losses"]]
    assert len(made) == STEPS
    assert made == pytest.approx(row["serial"]["losses"], rel=EXACT)
    for rank in row["ranks"]:
        assert rank["losses"] == row["ranks"][0]["losses"]
        for difference, where in rank["worst"]:
            assert difference <= EXACT, where
    for kind, elements in row["serial"]["elements"].items():
        if kind == GRADIENT:
            continue  # Summed over all steps, of which the resumed run made half.
        assert sum(rank["compared"].get(kind, 0) for rank in row["ranks"]) == elements, kind


def shoal(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "shoal", "train", "language:tiny", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(240)
def test_the_command_resumes_under_another_strategy(tmp_path: Path) -> None:
    before, after = "dp(2, zero=3) * tp(2)", 'pp(2, "1f1b", micro=4) * dp(2)'
    shoal(tmp_path, "--strategy", before, "--steps", str(STEPS), "--folder", "whole", "--no-gate")
    shoal(tmp_path, "--strategy", before, "--steps", str(HALF), "--folder", "moved", "--no-gate")
    shoal(tmp_path, "--strategy", after, "--steps", str(STEPS), "--resume", "moved", "--no-gate")
    whole, resumed = curve(tmp_path / "whole"), curve(tmp_path / "moved")
    assert [step for step, _ in resumed] == list(range(1, STEPS + 1))
    assert resumed[:HALF] == whole[:HALF]
    assert [loss for _, loss in resumed] == pytest.approx([loss for _, loss in whole], rel=1e-5)
    assert parse(json.loads((tmp_path / "moved" / "run.json").read_text())["strategy"]) == parse(after)
