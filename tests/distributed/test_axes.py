"""Every exact axis alone, at 2, 3 and 4 ranks, on models that nobody wrote to be cut: exact, or refused with a reason.

AdamW with clipping, on batches of which a third of the targets is ignored: six steps in `make test`, twenty in the
grid that is marked slow. `make test` proves every axis of every job at 2 ranks, with one schedule of the pipeline for
each job, and some axes at 3 and 4 ranks. What is refused is listed; each refusal says which module or number it is.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoal.job import Job, load_job
from shoal.launch import run_ranks
from shoal.layout.layout import facts_of, layout_of
from shoal.proof.certify import EXACT
from shoal.strategy import ModelFacts, Refusal, check, is_legal, parse

HERE = Path(__file__).parent
QUICK_STEPS, STEPS = 6, 20
SIZES = (2, 3, 4)
MICRO = {2: 4, 3: 6, 4: 4}
"""Micro-batches by number of stages: whole rounds of them, which divide the batch of 12."""

TASKS = ("language", "image")
FAMILIES = ("llama", "gpt2", "qwen2", "opt", "bert", "mixtral", "vit")
PLAIN = ("unet", "lstm", "moe")
JOBS = (*TASKS, *FAMILIES, *PLAIN)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble x 2")
AXES = (*SCHEDULES, "tp", "tp sequence", "tp batch", "cp ring", "cp ulysses", "ep")

NO_EXPERTS = "no experts to split"
NO_ATTENTION = "no attention was found"
NO_PAIR = "no pair of fully connected layers"
EIGHT = "seven layers cannot fill eight stages"
SEVENTEEN = "a sequence of 17 tokens does not divide"
NO_TOKENS_APART = "the tokens cannot be cut between layers: "
WHY_NOT: dict[str, dict[tuple[str, ...], dict[int, str]]] = {
    # job -> axes -> ranks -> what the refusal says
    "image": {
        ("tp",): {3: "features.0: 8 channels do not divide by 3"},
        ("tp batch",): {3: "classifier.1: 32 features do not divide by 3"},
        ("tp sequence",): dict.fromkeys(SIZES, "features.0"),
        ("cp ring", "cp ulysses"): dict.fromkeys(SIZES, NO_ATTENTION),
    },
    "llama": {("interleaved", "zero-bubble x 2"): {4: EIGHT}},
    "qwen2": {("interleaved", "zero-bubble x 2"): {4: EIGHT}},
    "bert": {("interleaved", "zero-bubble x 2"): {4: EIGHT}},
    "mixtral": {
        ("interleaved", "zero-bubble x 2"): {3: "five layers cannot fill six stages", 4: "five layers cannot fill"},
        ("tp sequence",): dict.fromkeys(SIZES, NO_TOKENS_APART + "index_add_ in model.layers.0.mlp.experts"),
        ("tp batch",): dict.fromkeys(SIZES, NO_PAIR),
    },
    "vit": {
        ("interleaved", "zero-bubble x 2"): {4: EIGHT},
        ("tp sequence", "cp ring", "cp ulysses"): dict.fromkeys(SIZES, SEVENTEEN),
    },
    "unet": {
        ("tp sequence",): dict.fromkeys(SIZES, NO_TOKENS_APART),
        ("tp batch",): dict.fromkeys(SIZES, NO_PAIR),
        ("cp ring", "cp ulysses"): dict.fromkeys(SIZES, NO_ATTENTION),
    },
    "lstm": {
        ("gpipe", "1f1b", "zero-bubble"): {4: "three layers cannot fill four stages"},
        ("interleaved", "zero-bubble x 2"): dict.fromkeys(SIZES, "three layers cannot fill"),
        ("tp", "tp sequence", "tp batch"): dict.fromkeys(SIZES, "nothing of the model can be cut: head"),
        ("cp ring", "cp ulysses"): dict.fromkeys(SIZES, NO_ATTENTION),
    },
    "moe": {
        ("interleaved", "zero-bubble x 2"): {3: "five layers cannot fill six stages", 4: "five layers cannot fill"},
        ("tp sequence",): dict.fromkeys(SIZES, NO_TOKENS_APART + "index in layers.0.mixture"),
        ("tp batch",): dict.fromkeys(SIZES, NO_PAIR),
    },
}
for _job in JOBS:
    if _job not in ("mixtral", "moe"):
        WHY_NOT.setdefault(_job, {})["ep",] = dict.fromkeys(SIZES, NO_EXPERTS)


def text(axis: str, ranks: int) -> str:
    """The strategy that an axis alone is."""
    kind, _, how = axis.partition(" ")
    if kind == "cp":
        return f'cp({ranks}, "{how}")'
    if kind in ("tp", "ep"):
        return f"{kind}({ranks}{f', {how}=True' if how else ''})"
    chunks = ", chunks=2" if how or axis == "interleaved" else ""
    return f'pp({ranks}, "{kind}", micro={MICRO[ranks]}{chunks})'


def why_not(job: str, axis: str, ranks: int) -> str | None:
    """What legality should say against it; None if it should run."""
    reasons = WHY_NOT.get(job, {})
    return next((by[ranks] for axes, by in reasons.items() if axis in axes and ranks in by), None)


GRID = [(job, axis, ranks) for ranks in SIZES for job in JOBS for axis in AXES]
LEGAL = [case for case in GRID if why_not(*case) is None]
ILLEGAL = [
    # The same reason at three sizes is told once in `make test`.
    pytest.param(job, axis, n, marks=[pytest.mark.slow] if n > 2 and why_not(job, axis, 2) == why else [])
    for job, axis, n in GRID
    if (why := why_not(job, axis, n)) is not None
]


def is_in_turn(job: str, axis: str, ranks: int) -> bool:
    """Whether `make test` proves it: at 2 ranks one schedule and all else, at 3 one axis of every second job, at 4 one
    of each other."""
    turn = JOBS.index(job)
    mine = [each for each in AXES if why_not(job, each, ranks) is None]
    schedules = [each for each in mine if each in SCHEDULES]
    if ranks == 2:
        return axis not in SCHEDULES or axis == schedules[turn % len(schedules)]
    return (turn + ranks) % 2 == 0 and axis == mine[(5 * turn + ranks) % len(mine)]


QUICK = [case for case in LEGAL if is_in_turn(*case)]
REST = [case for case in LEGAL if case not in QUICK]


def spec_of(job: str) -> str:
    if job in FAMILIES and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return f"{HERE / 'jobs' / ('plain.py' if job in PLAIN else 'uneven.py')}:{job}"


@cache
def loaded(job: str) -> Job:
    return load_job(spec_of(job))


@cache
def whole_facts(job: str) -> ModelFacts:
    """What legality knows of a job when every axis is asked for."""
    return facts_of(loaded(job), layout_of(loaded(job)))


def refusals(job: str, axis: str, ranks: int) -> tuple[Refusal, ...]:
    strategy = parse(text(axis, ranks))
    return check(strategy, facts=facts_of(loaded(job), layout_of(loaded(job), strategy)))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where serial runs are kept: three sizes and eleven axes are held to the same ones."""
    return str(tmp_path_factory.mktemp("references"))


@cache
def rows(ranks: int, jobs: tuple[str, ...], quick: bool, folder: str) -> dict[tuple[str, str], Any] | Exception:
    """(job, axis) -> each rank's row; or why there are none, which is kept as well."""
    cases = [(job, axis) for job, axis, n in (QUICK if quick else REST) if n == ranks and job in jobs]
    strategies = [(spec_of(job), text(axis, ranks)) for job, axis in cases]
    asked = {"cases": strategies, "steps": QUICK_STEPS if quick else STEPS, "references": folder}
    try:
        found = run_ranks("distributed.proofs:prove_many", asked, ranks=ranks, hang_after_s=60)
    except Exception as error:
        return error
    return dict(zip(cases, (list(row) for row in zip(*found, strict=True)), strict=True))


def prove(job: str, axis: str, ranks: int, *, quick: bool, folder: str) -> None:
    # One start for all the quick jobs of a kind: importing transformers takes longer than training such models.
    alike = FAMILIES if job in FAMILIES else tuple(each for each in JOBS if each not in FAMILIES)
    found = rows(ranks, alike if quick else (job,), quick, folder)
    assert not isinstance(found, Exception), found
    assert_exact(found[job, axis])


def assert_exact(row: list[dict[str, Any]]) -> None:
    """Every rank within 1e-10 and as its ledger was predicted, and every element of the model compared by someone."""
    for rank in row:
        assert "refused" not in rank, rank
        assert rank["difference"] <= EXACT == 1e-10, (rank["case"], rank["where"], rank["difference"])
        assert rank["ledger"] == [], rank["case"]
        assert len(rank["losses"]) > 1
    for kind, elements in row[0]["elements"].items():
        assert sum(rank["compared"].get(kind, 0) for rank in row) == elements, f"{row[0]['case']}: {kind}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("job", "axis", "ranks"), QUICK)
def test_an_axis_alone_trains_exactly_as_the_serial_run(job: str, axis: str, ranks: int, references: str) -> None:
    assert not refusals(job, axis, ranks)
    prove(job, axis, ranks, quick=True, folder=references)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("job", "axis", "ranks"), REST)
def test_an_axis_alone_trains_exactly_over_the_whole_grid(job: str, axis: str, ranks: int, references: str) -> None:
    assert not refusals(job, axis, ranks)
    prove(job, axis, ranks, quick=False, folder=references)


@pytest.mark.parametrize(("job", "axis", "ranks"), ILLEGAL)
def test_what_cannot_be_cut_is_refused_with_its_name_and_the_reason(job: str, axis: str, ranks: int) -> None:
    found = refusals(job, axis, ranks)
    expected = why_not(job, axis, ranks)
    assert expected is not None
    assert any(expected in refusal.reason for refusal in found), found
    # The term at fault is named, and something like it that can be run.
    assert str(found[0].term) == str(parse(text(axis, ranks)))
    assert found[0].nearest, found
    assert all(is_legal(near, facts=whole_facts(job)) for near in found[0].nearest)


@pytest.mark.parametrize("job", [*TASKS, *FAMILIES, "unet", "moe"])
def test_a_pipeline_deeper_than_the_model_is_refused(job: str) -> None:
    found = check(parse("pp(64)"), facts=facts_of(loaded(job), layout_of(loaded(job), parse("pp(64)"))))
    assert any("cannot fill 64 stages" in refusal.reason for refusal in found), found


def test_a_running_total_forbids_the_cuts_it_would_be_lost_at() -> None:
    job = load_job(f"{HERE / 'jobs' / 'plain.py'}:running_total")
    found = check(parse("pp(3)"), facts=facts_of(job, layout_of(job, parse("pp(3)"))))
    assert "layers.1 needs more than its arguments: a result of add in RunningTotal" in found[0].reason


def test_every_axis_is_proven_at_every_size_and_every_schedule_in_the_quick_run() -> None:
    assert {(axis, ranks) for _, axis, ranks in LEGAL} == {(axis, ranks) for axis in AXES for ranks in SIZES}
    assert {axis for _, axis, _ in QUICK} == set(AXES)
    assert {ranks for _, _, ranks in QUICK} == set(SIZES)
    assert {job for job, _, _ in QUICK} == set(JOBS)
