"""A planted cause is named first, and removing it gains what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.comm.ledger import Entry, Key, Ledger
from shoal.comparison.explaining.causes import causes
from shoal.comparison.explaining.differing import differences, in_words, parting, settings
from shoal.comparison.explaining.evidence import Probed
from shoal.comparison.explaining.failures import Fitting, why_failed
from shoal.training.record.run import Run

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
    sent = Ledger({Key("dp", "gradient", "all_reduce"): Entry(1, 1, 1_000_000)})
    found = causes("dp(2)", [rank(0.1, wait=0.07), rank(0.1, wait=0.01)], ledger=sent)
    assert [each.name for each in found] == ["late-rank", "communication"]
    assert [each.gain_s for each in found] == pytest.approx([0.06, 0.01])
    assert "rank 1" in found[0].text
    assert "100 MB/s" in found[1].text


def test_even_ranks_that_wait_have_a_slow_link() -> None:
    found = causes("dp(2)", [rank(0.1, wait=0.08), rank(0.1, wait=0.08)])
    assert [each.name for each in found] == ["communication"]


def test_a_pipelines_wait_is_bubble_imbalance_and_communication() -> None:
    # 1F1B of two stages and four micro-batches: the slower stage works without a pause, between the first forward of
    # the other and its last backward; equal stages would idle for one of five turns.
    found = causes("pp(2, '1f1b', micro=4)", [rank(0.1, wait=0.05), rank(0.1, wait=0.03)])
    gains = {each.name: each.gain_s for each in found}
    assert gains == pytest.approx({"communication": 0.0175, "bubble": 0.015, "imbalance": 0.0075})


def test_a_late_replica_of_a_stage_is_no_imbalance() -> None:
    late = [rank(0.1, wait=0.05), rank(0.1, wait=0.02)] * 2
    names = [each.name for each in causes("pp(2, '1f1b', micro=4) * dp(2)", late)]
    assert "late-rank" in names
    assert "imbalance" not in names


def test_latency_of_small_messages_is_told_from_bytes() -> None:
    sent = Ledger({Key("dp", "gradient", "all_reduce"): Entry(20, 20, 200_000)})
    link = "2x1, 10us, 20GB/s | 3ms, 1MB/s"  # 60 ms of latency, 200 ms of bytes
    found = causes("dp(2)", [rank(0.3, wait=0.26)] * 2, ledger=sent, arguments={"emulate": link})
    assert {each.name: each.gain_s for each in found} == pytest.approx(
        {"communication": 0.203, "small-messages": 0.057}
    )


def test_a_batch_that_is_too_small_is_told_from_work_that_grows_with_it() -> None:
    def probed(fixed: float) -> Probed:
        return Probed(samples=4, fixed_s=fixed, growing_s=0.08 - fixed, update_s=0.02, forward_s=0.02, kept_bytes=10**6)

    assert causes("serial", [rank(0.1)], probed=probed(0.0))[0].gain_s == pytest.approx(0.75 * 0.02)
    found = causes("serial", [rank(0.1)], probed=probed(0.08))[0]
    assert (found.name, found.gain_s) == ("small-batch", pytest.approx(0.075))


def test_recomputation_is_no_cause_where_activations_would_not_fit() -> None:
    probed = Probed(
        samples=4,
        fixed_s=0.0,
        growing_s=0.06,
        update_s=0.0,
        forward_s=0.03,
        kept_bytes=6 * 10**9,
        memory_bytes=8 * 10**9,
    )
    known: dict[str, Any] = {"probed": probed, "memory_bytes": 10**9}
    names = [each.name for each in causes("recompute('full')", [rank(0.1, forward=0.03)], **known)]
    assert "recompute" not in names


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


def run_of(*, reason: str | None = None, losses: tuple[float, ...] = (), strategy: str = "dp(2)", **more: Any) -> Run:
    steps = tuple(
        {"step": n, "samples": 8 * n, "loss": loss, "grad_norm": loss, "lr": 0.1, "step_s": 0.1}
        for n, loss in enumerate(losses, start=1)
    )
    return Run(
        strategy=strategy,
        world=2,
        step_s=0.1,
        folder=Path("run"),
        status="failed" if reason else "finished",
        reason=reason,
        job="job",
        contract="exact",
        seed=0,
        started="today",
        steps=steps,
        **more,
    )


def test_what_two_runs_set_differently_and_where_their_losses_part() -> None:
    one = run_of(losses=(3.0, 2.5, 2.0), arguments={"emulate": None, "folder": "a"}, environment={"threads": 1})
    other = run_of(
        losses=(3.0, 2.5, 1.0),
        strategy="dp(2, zero=3)",
        arguments={"emulate": "slow", "folder": "b"},
        environment={"threads": 1},
    )
    assert settings(one, other) == [("strategy", "dp(2)", "dp(2, zero=3)"), ("--emulate", "-", "slow")]
    parts = differences([rank(0.1, wait=0.01)] * 2, [rank(0.2, wait=0.11)] * 2)
    why = in_words(parts, settings(one, other), 0.1)
    assert why.startswith("A step of the second takes 100 ms longer, 100 ms of it in communication: --emulate - and")
    assert in_words(parts, [], 100.0) == "Their steps take as long."
    assert "part at step 3" in parting(one, other)
    assert "agree in all 3" in parting(one, one)


def test_a_loss_that_diverged_is_told_from_one_bad_step() -> None:
    reason = "step 6: the loss is nan (sum nan over 4 tokens)"
    grown = " ".join(why_failed(run_of(reason=reason, losses=(2.0, 2.0, 2.1, 9.0, 80.0))))
    assert "grew from 2.05 to 80" in grown
    sudden = " ".join(why_failed(run_of(reason=reason, losses=(2.0, 2.0, 2.1, 2.0, 2.0))))
    assert "samples, 40 to 47" in sudden


def test_out_of_memory_says_what_was_asked_for_and_which_change_fits() -> None:
    reason = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400000000 bytes. Error code 12"
    fitting = Fitting(
        now_bytes={"parameters": 10**9, "optimizer": 2 * 10**9},
        libraries_bytes=3 * 10**8,
        smaller=(("dp(2, zero=1)", 2 * 10**9), ("dp(2, zero=3)", 15 * 10**8)),
    )
    run = run_of(reason=reason, summary={"memory_limit_bytes": 4 * 10**9, "memory_bytes": 19 * 10**8})
    text = " ".join(why_failed(run, lambda run: fitting))
    assert "400 MB" in text
    assert "optimizer 2 GB" in text
    assert "What fits: dp(2, zero=3) (1.8 GB)." in text


def test_a_hang_has_the_rank_and_its_stack() -> None:
    reason = (
        "rank 1 is late: it has not entered all_reduce number 3 (axis dp, phase gradient), which rank 0 entered 5 s ago"
    )
    lines = why_failed(run_of(reason=reason, failure={"rank": 1, "stack": "rank 1:\n  mine.py:3 in stuck"}))
    assert "rank 1" in lines[0]
    assert "mine.py:3 in stuck" in lines[1]


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


STAGES = """
import time
from dataclasses import replace
from functools import partial
from shoal.job import LayoutHints, load_job
from shoal.job.models.gpt import GPT, Block

class Slow(Block):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)

def model(config):
    made = GPT(config)
    for block in made.blocks:
        block.__class__ = Slow
    return made

plain = load_job("language:tiny")
even = replace(plain, model=partial(model, replace(plain.model().config, layers=4)), validation=None)
job = replace(even, layout=LayoutHints(stages=("blocks.0",)))
"""


PLANTED: dict[str, dict[str, Any]] = {
    "late-rank": {"straggler": f"rank 1: {1000 * PLANTED_S:g} ms"},
    "communication": {"emulate": "2x1, 10us, 20GB/s | 50us, 1.3Mb/s"},
    "small-messages": {"emulate": "2x1, 10us, 20GB/s | 60ms, 20GB/s", "bucket_mb": 0.008},
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
    step_s = undisturbed.step_s
    if name == "small-messages":
        step_s = explained(tmp_path / "large", job, emulate=PLANTED[name]["emulate"]).step_s
    assert found.causes[0].gain_s == pytest.approx(found.step_s - step_s, rel=0.25), found


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_unequal_stages_are_named_first_with_the_gain_of_equal_ones(tmp_path: Path) -> None:
    path = tmp_path / "stages.py"
    path.write_text(STAGES)
    times = {}
    for name in ("job", "even"):
        run = shoal.train(
            f"{path}:{name}",
            "pp(2, '1f1b', micro=4)",
            steps=STEPS,
            global_batch=8,
            gate=False,
            checkpoint_every=0,
            evaluate_every=0,
            folder=tmp_path / name,
        )
        times[name] = shoal.explain_run(run, measure=False)
    found = times["job"]
    assert found.causes[0].name == "imbalance", found
    assert found.causes[0].gain_s == pytest.approx(found.step_s - times["even"].step_s, rel=0.25), found


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "strategy", "batch", "without", "larger"),
    [("small-batch", "serial", 2, "serial", 8), ("recompute", "recompute('full')", 128, "serial", 128)],
)
def test_a_cause_in_the_computing_is_named_first(
    tmp_path: Path, name: str, strategy: str, batch: int, without: str, larger: int
) -> None:
    def of(strategy: str, batch: int) -> Any:
        run = shoal.train(
            "language:tiny",
            strategy,
            steps=30,
            global_batch=batch,
            gate=False,
            checkpoint_every=0,
            evaluate_every=0,
            folder=tmp_path / f"{strategy}-{batch}".replace("'", ""),
        )
        return shoal.explain_run(run)

    found, removed = of(strategy, batch), of(without, larger)
    own = [each for each in found.causes if each.name != "off-core"]  # Other programs may run beside the tests.
    assert own[0].name == name, found
    # Time on a core, which other programs hardly change, for the same samples.
    (before,), (after,) = ([row["cpu_s"] for row in each.ranks] for each in (found, removed))
    gained = 1 - after * batch / larger / before
    off = sum(each.share for each in found.causes if each.name == "off-core")
    share = own[0].share / (1 - off) if name == "recompute" else own[0].gain_s / before
    assert share == pytest.approx(gained, rel=0.25), (found, removed)
