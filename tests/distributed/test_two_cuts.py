"""tp(sequence=True) within cp and in pipelines: exact where tp cuts what cp has cut, refused by name where their ends
cross, and exact for blocks of a stage that tp leaves unsplit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.proof.certify import EXACT, verify
from shoal.strategy import parse
from shoal.strategy.legality.check import IllegalStrategy

JOBS = Path(__file__).parent / "jobs" / "two_cuts.py"


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("job", ["mlp_last", "attends", "attends_pooled"])
def test_tokens_are_cut_within_a_part_of_the_sequence(job: str, method: str) -> None:
    proof = verify(f"{JOBS}:{job}", parse(f'cp(2, "{method}") * tp(2, sequence=True)'), steps=2)
    assert proof.max_rel_diff <= EXACT, proof


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("mlp_first", r"tp begins at blocks\.0 and cp at blocks\.1, the first block that attends"),
        ("mlp_first_pooled", r"tp begins at blocks\.0 and cp at blocks\.1, the first block that attends"),
        ("mlp_last_pooled", r"tp ends at blocks\.1 and cp at blocks\.0, the last block that attends"),
    ],
)
def test_cuts_whose_ends_cross_are_refused(job: str, why: str) -> None:
    with pytest.raises(IllegalStrategy, match=why):
        verify(f"{JOBS}:{job}", parse("cp(2) * tp(2, sequence=True)"), steps=1)


@pytest.mark.parametrize("strategy", ["tp(2, sequence=True)", "pp(2, '1f1b', micro=2) * tp(2, sequence=True)"])
def test_blocks_without_a_region_are_summed_over_the_parts_of_the_stream(strategy: str) -> None:
    """Also where they end or begin a stage."""
    proof = verify(f"{JOBS}:uncut_between", parse(strategy), steps=2)
    assert proof.passed, proof
    assert proof.max_rel_diff <= EXACT, proof
