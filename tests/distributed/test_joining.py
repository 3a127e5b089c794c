"""Ranks that come to a run under way: killed ones that are started again, and new replicas."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.conftest import load
from distributed.test_lost_islands import last_values
from shoal.job import load_job, share
from shoal.runtime.step import build_model
from shoal.strategy import parse
from shoal.training.growing import BadJoin, Join, grown, read_join, require_can_come
from shoal.training.local import CannotTrain, train_job
from shoal.training.options import TrainOptions
from shoal.training.record.run import RUN, read_json
from shoal.training.restored import train_restoring

LOOSE = str(Path(__file__).parent / "jobs" / "loose.py")
STEPS, EVERY = 22, 6
RAMP: Any = {"scale_rule": "linear", "base_batch": 6, "warmup": 40}
"""The learning rate doubles over 40 steps."""
TARGET = "distributed.joining_targets:train_with_newcomer"


@pytest.fixture(autouse=True)
def loaded() -> None:
    load("distributed.joining_targets")


def train(folder: Path, strategy: str, *, fault: str | None = None, **options: Any) -> tuple[list[Any], list[Any]]:
    """The outcomes of all ranks, and what was reported."""
    folder.mkdir()
    given = TrainOptions(
        job=LOOSE, strategy=strategy, folder=str(folder), gate=False, checkpoint_every=EVERY, **options
    )
    said: list[Any] = []
    found = train_restoring(
        given, parse(strategy).world, hang_after_s=40, on_message=said.append, target=TARGET, fault=fault
    )
    return found, said


def simulated(islands: int, *, lost: int, came: int, grown: int = 0) -> dict[str, torch.Tensor]:
    """local(3) of the loose job in plain PyTorch. The last island is lost at step `lost` (0: none) and comes back at
    step `came` as a copy of the first; with `grown` so many come there that had not been."""
    job = replace(load_job(LOOSE), **RAMP)
    torch.manual_seed(job.seed)
    models = [build_model(job) for _ in range(islands)]
    optimizers = [job.optimizer([{"params": list(model.parameters())}]) for model in models]
    order, counter, counts = job.order(), 0, [0.0] * islands
    for step in range(STEPS):
        if lost and step == lost:
            del models[-1], optimizers[-1], counts[-1]
        if step == came:
            for _ in range(grown or 1):
                models.append(build_model(job))
                models[-1].load_state_dict(models[0].state_dict())
                optimizers.append(job.optimizer([{"params": list(models[-1].parameters())}]))
                optimizers[-1].load_state_dict(deepcopy(optimizers[0].state_dict()))
                counts.append(0.0)
        indices = order.indices(counter)
        counter = order.next(counter)
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = 0.1 * job.lr_factor(step)
            batch = job.train.batch(share(indices, rank=number, ranks=len(models)))
            loss, count = job.loss(model(batch["x"]), batch)
            optimizer.zero_grad()
            (loss / count).backward()
            optimizer.step()
            counts[number] += float(count)
        if (step + 1) % 3 == 0 or step + 1 == STEPS:
            # What a killed island had learned since the last average is lost with it.
            live = len(models) - (step + 1 == lost)
            total = sum(counts[:live])
            with torch.no_grad():
                for params in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p * (n / total) for p, n in zip(params[:live], counts, strict=False))
                    for param in params:
                        param.copy_(mean)
            counts = [0.0] * len(models)
    return models[0].state_dict()


def away(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def test_a_killed_island_comes_back_and_has_what_the_others_have(tmp_path: Path) -> None:
    """Parameters, momentum, learning rate (of a warm-up) and place in the data, as a simulation in plain PyTorch."""
    outcomes, said = train(tmp_path / "run", "dp(3, sync=local(3))", fail="rank 2 at step 5", rejoin=True, **RAMP)
    assert [(each["status"], each["step"]) for each in outcomes] == [("finished", STEPS)] * 3
    lost, came = outcomes[0]["recovery"]
    assert (lost["lost"], lost["step"], lost["lost_steps"], lost["lost_samples"]) == ([2], 6, 3, 12)
    assert came["came"] == [2]
    assert came["step"] in range(EVERY, STEPS, 3)
    assert came["missed_steps"] == came["step"] - 6
    assert came["warmup_s"] > 0
    assert 0 < came["copying_s"] < came["pause_s"]
    assert lost["detection_s"] >= 0 < lost["agreement_s"]
    assert [each["came"] for each in said if each["event"] == "joined"] == [[2]]
    assert read_json(tmp_path / "run" / RUN)["summary"]["recovery"] == [lost, came]
    rows = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    assert len(rows) == STEPS  # No step is made twice.
    wanted = simulated(3, lost=6, came=came["step"])
    assert away(last_values(tmp_path / "run"), wanted) < 1e-5
    assert away(simulated(3, lost=6, came=STEPS), wanted) > 1e-3


@pytest.mark.parametrize("fault", ["rate", "place", "momentum"])
def test_planted_newcomers_are_found(tmp_path: Path, fault: str) -> None:
    """One with an old learning rate, one at an old place in the data, one whose optimiser begins anew."""
    outcomes, _ = train(
        tmp_path / "run", "dp(3, sync=local(3))", fault=fault, fail="rank 2 at step 5", rejoin=True, **RAMP
    )
    came = outcomes[0]["recovery"][1]["step"]
    assert away(last_values(tmp_path / "run"), simulated(3, lost=6, came=came)) > 1e-4


def test_new_replicas_join(tmp_path: Path) -> None:
    outcomes, _ = train(tmp_path / "run", "dp(2, sync=local(3))", join="2 at step 5", **RAMP)
    assert [(each["status"], each["step"], each["world"]) for each in outcomes] == [("finished", STEPS, 4)] * 4
    [came] = outcomes[0]["recovery"]
    assert (came["came"], came["missed_steps"]) == ([2, 3], 0)
    assert "lost" not in outcomes[0]
    wanted = simulated(2, lost=0, came=came["step"], grown=2)
    assert away(last_values(tmp_path / "run"), wanted) < 1e-5
    assert read_json(tmp_path / "run" / RUN)["strategy"] == "dp(4, sync=local(3))"


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("dp(3, sync=asp(), via=ps(1))", 1),
        ("dp(2, sync=diloco(2, quorum=1)) * dp(1)", 1),
        pytest.param("dp(3, sync=ssp(2), via=ps(1))", 2, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=softsync(2), via=ps(1, colocated=True))", 1, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=bsp(backup=1), via=ps(1))", 1, marks=pytest.mark.slow),
        pytest.param("dp(2, sync=asp(), via=ps(1)) * dp(2, zero=2)", 3, marks=pytest.mark.slow),
        pytest.param("dp(2, sync=diloco(2)) * dp(2, zero=3)", 3, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=diloco(3, fragments=2, overlap=1, blend=0.5))", 1, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=diloco(3), compress=topk(0.1))", 1, marks=pytest.mark.slow),
        pytest.param('dp(4, sync=gossip("ring"))', 2, marks=pytest.mark.slow),
        pytest.param('dp(4, sync=gossip("random", h=2, momentum=0.5, lr=0.7))', 2, marks=pytest.mark.slow),
        pytest.param('dp(4, sync=gossip("one-peer", "push-sum"))', 2, marks=pytest.mark.slow),
        pytest.param('dp(4, sync=gossip("ring", "async"))', 2, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=elastic(2, 0.3))", 2, marks=pytest.mark.slow),
        pytest.param("dp(3, sync=hogwild())", 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_comes_back_under_every_scheme(tmp_path: Path, strategy: str, victim: int) -> None:
    outcomes, said = train(tmp_path / "run", strategy, fail=f"rank {victim} at step 5", rejoin=True)
    assert [(each["status"], each["step"]) for each in outcomes if "status" in each] == [("finished", STEPS)] * (
        parse(strategy).workers
    )
    kinds = [next(name for name in ("lost", "came") if name in row) for row in outcomes[0]["recovery"]]
    assert kinds == ["lost", "came"]
    assert victim in outcomes[0]["recovery"][1]["came"]
    assert outcomes[0]["recovery"][1]["pause_s"] < 10
    losses = [message["metrics"]["loss"] for message in said if message["event"] == "metrics"]
    assert len(losses) >= 7
    assert all(map(isfinite, losses))
    if "servers" in outcomes[0] and "asp" in strategy:  # Every ticket was learned from once.
        replicas = parse(strategy).axes[0].size
        assert outcomes[0]["servers"]["gradients"] == replicas * STEPS


@pytest.mark.slow
def test_a_rank_may_be_lost_and_come_back_twice(tmp_path: Path) -> None:
    outcomes, _ = train(
        tmp_path / "run",
        "dp(3, sync=local(3))",
        rejoin=True,
        fail="rank 2 at step 5; rank 2 at step 17; rank 1 at step 11",
    )
    assert [row["ranks"] for row in outcomes[0]["lost"]] == [[2], [1], [2]]
    assert [row["came"] for row in outcomes[0]["recovery"] if "came" in row][:2] == [[2], [1]]
    assert outcomes[0]["status"] == "finished"


@pytest.mark.slow
def test_the_same_worker_may_come_back_twice(tmp_path: Path) -> None:
    """The second time it waits for a session after the one that it was in before."""
    outcomes, _ = train(
        tmp_path / "run", "dp(3, sync=asp(), via=ps(1))", fail="rank 1 at step 5; rank 1 at step 13", rejoin=True
    )
    assert [row["came"] for row in outcomes[0]["recovery"] if "came" in row] == [[1], [1]]
    assert outcomes[0]["servers"]["gradients"] == 3 * STEPS
    assert len(outcomes[0]["servers"]["lost_workers"]) == 2


@pytest.mark.slow
def test_a_run_that_grew_loses_a_rank_and_has_it_back(tmp_path: Path) -> None:
    outcomes, _ = train(
        tmp_path / "run", "dp(2, sync=diloco(3)) * dp(2)", join="1 at step 6", fail="rank 3 at step 11", rejoin=True
    )
    assert [each["status"] for each in outcomes] == ["finished"] * 6
    assert next(row["came"] for row in outcomes[0]["recovery"] if "came" in row) == [4, 5]
    assert {rank for row in outcomes[0]["recovery"] for rank in row.get("came", ())} >= {2, 3, 4, 5}


def test_a_strategy_grows_by_its_outermost_level() -> None:
    assert str(grown(parse("dp(2, sync=local(4)) * tp(2)"), 1)) == "dp(3, sync=local(4)) * tp(2)"
    assert read_join("2 at step 40") == Join(2, 40)
    assert read_join(None) is None


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        ("dp(2)", {"rejoin": True}, "no rank can be lost while the others go on"),
        ("dp(2)", {"join": "1 at step 3"}, "no level of replicas on the outside that run by themselves"),
        ("dp(2, sync=asp(), via=ps(1))", {"join": "1 at step 3"}, "colocated=True"),
        ("dp(2, sync=local(2))", {"join": "one more"}, "expected a number of replicas and a step"),
        ("dp(2, sync=local(2))", {"rejoin": True, "weights_only": True}, "--weights-only leaves out what it needs"),
        ("dp(2, sync=local(2))", {"rejoin": True, "checkpoints": False}, "--checkpoint-every 0 writes none"),
    ],
)
def test_refusals_say_what_works(strategy: str, options: dict[str, Any], reason: str) -> None:
    given = {"rejoin": False, "join": None, "checkpoints": True, "weights_only": False, **options}
    with pytest.raises(BadJoin, match=reason):
        require_can_come(parse(strategy), **given)


def test_a_join_that_the_batch_cannot_be_split_for_is_refused_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match="--rejoin"):
        train_job(LOOSE, "dp(2)", folder=tmp_path / "run", rejoin=True, gate=False)
