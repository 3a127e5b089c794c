"""A planted cause is named first, and removing it gains what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.comparison.findings import causes, differences, why_failed

STEPS = 6
PLANTED_S = 1.0
"""A step: much longer than what another program on the machine may take of one."""


def rank(
    wall: float, wait: float = 0.0, data: float = 0.0, forward: float = 0.01, cpu: float | None = None
) -> dict[str, Any]:
    busy = wall - wait - data
    return {"wall_s": wall, "wait_s": wait, "data_s": data, "forward_s": forward, "cpu_s": busy if cpu is None else cpu}


def test_communication_is_told_from_waiting_for_a_late_rank() -> None:
    # Rank 1 works 60 ms longer; 10 ms are on the wire for both.
    found = causes("dp(2)", [rank(0.1, wait=0.07), rank(0.1, wait=0.01)], sent_bytes=1_000_000)
    assert [each.name for each in found] == ["late-rank", "communication"]
    assert [each.gain_s for each in found] == pytest.approx([0.06, 0.01])
    assert "rank 1" in found[0].text
    assert "100 MB/s" in found[1].text


def test_even_ranks_that_wait_have_a_slow_link() -> None:
    found = causes("dp(2)", [rank(0.1, wait=0.08), rank(0.1, wait=0.08)])
    assert [each.name for each in found] == ["communication"]


def test_a_pipelines_wait_is_bubble_imbalance_and_communication() -> None:
    # 1F1B of two stages and four micro-batches idles for a fifth.
    found = causes("pp(2, '1f1b', micro=4)", [rank(0.1, wait=0.05), rank(0.1, wait=0.03)])
    gains = {each.name: each.gain_s for each in found}
    assert gains == pytest.approx({"bubble": 0.02, "imbalance": 0.01, "communication": 0.01})


def test_recomputation_data_and_a_busy_machine_are_named() -> None:
    found = causes("serial", [rank(0.1, data=0.04, forward=0.03)])
    assert [each.name for each in found] == ["data"]
    assert "--prefetch" in found[0].text
    assert [each.name for each in causes("dp(2) * recompute('full')", [rank(0.1, forward=0.03)] * 2)] == ["recompute"]
    assert causes("dp(2)", [rank(0.1, cpu=0.02)] * 2)[0].name == "off-core"
    assert causes("dp(2)", []) == []


def test_two_runs_differ_by_what_changed() -> None:
    rows = differences([rank(0.1, wait=0.01)] * 2, [rank(0.2, wait=0.11)] * 2)
    assert rows[0] == ("the step", pytest.approx(0.1))
    assert rows[1] == ("communication", pytest.approx(0.1))


@pytest.mark.parametrize(
    ("reason", "word"),
    [("step 3: the loss is nan (sum nan over 4 tokens)", "finite"), ("rank 1 was killed by signal 9", "Memory"),
     ("no rank has made progress for 60 s; rank 0 is at loop.py:3", "waited for each other")],
)  # fmt: skip
def test_a_failed_run_has_advice(reason: str, word: str) -> None:
    assert word in why_failed(reason)


SLOW_DATA = """
import time
from dataclasses import dataclass, replace
from typing import Any
from shoal.job import load_job

@dataclass
class Slow:
    data: Any
    def __len__(self):
        return len(self.data)
    def batch(self, indices):
        time.sleep(1.0)
        return self.data.batch(indices)

plain = load_job("language:tiny")
job = replace(plain, train=Slow(plain.train), validation=None)
"""


PLANTED: dict[str, dict[str, Any]] = {
    "late-rank": {"straggler": f"rank 1: {1000 * PLANTED_S:g} ms"},
    "communication": {"emulate": "2x1, 10us, 20GB/s | 50us, 1.3Mb/s"},
    "data": {},
}


def explained(folder: Path, job: str = "language:tiny", **options: Any) -> Any:
    run = shoal.train(
        job, "dp(2)", steps=STEPS, gate=False, checkpoint_every=0, evaluate_every=0, folder=folder, **options
    )
    return shoal.explain_run(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return explained(tmp_path_factory.mktemp("explain") / "base")


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["late-rank", *(pytest.param(name, marks=pytest.mark.slow) for name in ("communication", "data"))]
)
def test_a_planted_cause_is_named_first_with_the_gain_of_removing_it(
    undisturbed: Any, tmp_path: Path, name: str
) -> None:
    job = "language:tiny"
    if name == "data":
        job = str(tmp_path / "slow.py")
        Path(job).write_text(SLOW_DATA)
    found = explained(tmp_path / "run", job, **PLANTED[name])
    assert found.causes[0].name == name, found
    assert found.causes[0].gain_s == pytest.approx(found.step_s - undisturbed.step_s, rel=0.25), found
