"""PipeDream on real ranks: it is what its definition says, to rounding; each micro-batch sees one set of weights;
staleness, versions and traffic are as promised; and runs stop, resume and fail as other runs do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.pipedream_targets import JOBS
from distributed.training_targets import checkpoint_bytes, curve
from shoal.comm.ledger import Ledger
from shoal.launch import RankFailed
from shoal.parallel.pipeline.pipedream import micros_reported
from shoal.proof.certify import verify
from shoal.strategy import parse
from shoal.training.entry import train_run

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.pipedream_targets"
BESIDE = f"{TARGETS}:beside_the_simulation"
TRAIN = train_run
EXACT = 1e-10

CASES: list[tuple[str, str, int, list[int]]] = [
    # job, strategy, steps, after which of them the pipeline is drained
    ("adamw", 'pp(1, "pipedream", micro=4)', 3, []),
    ("clipped", 'pp(1, "pipedream", micro=3) * dp(2)', 3, []),
    ("adamw", 'pp(2, "pipedream", micro=4)', 4, []),
    ("momentum", 'pp(2, "pipedream", micro=1)', 6, []),
    ("momentum", 'pp(2, "pipedream", micro=4, predict=True)', 5, [3]),
    ("adamw", 'pp(2, "pipedream", micro=3) * recompute("full")', 3, []),
    ("adamw", 'pp(2, "pipedream", micro=3, predict=True) * recompute("selective")', 3, []),
    ("momentum", 'pp(3, "pipedream", micro=4)', 4, [1, 2]),
    ("adamw", 'pp(3, "pipedream", micro=6, predict=True)', 3, []),
    ("sgd", 'pp(3, "pipedream", micro=2)', 5, []),
    ("adamw", 'pp(4, "pipedream", micro=6)', 3, []),
    ("momentum", 'pp(4, "pipedream", micro=2)', 6, [4]),
    ("adamw", 'pp(2, "pipedream", micro=4) * dp(2)', 4, [2]),
    ("ignored", 'dp(2) * pp(2, "pipedream", micro=4)', 4, []),
    ("trust", 'pp(2, "pipedream", micro=4) * dp(2)', 3, []),
    ("sometimes", 'pp(2, "pipedream", micro=6) * dp(2)', 4, []),
    ("norm", 'pp(2, "pipedream", micro=2) * dp(2)', 4, []),
    ("paired", 'pp(2, "pipedream", micro=4) * tp(2)', 3, []),
]
WORLDS = sorted({parse(case[1]).world for case in CASES})


RAN: dict[int, list[Any]] = {}
"""What the cases of each number of ranks gave: the tests below look at the same runs."""


def ran(ranks: Ranks, world: int) -> list[tuple[tuple[str, str, int, list[int]], dict[str, Any]]]:
    """(case, what one rank reports of it), for all ranks."""
    cases = [case for case in CASES if parse(case[1]).world == world]
    if world not in RAN:
        RAN[world] = ranks(BESIDE, {"cases": cases}, ranks=world, timeout_s=120)
    return [(case, row) for rank in RAN[world] for case, row in zip(cases, rank, strict=True)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_equals_a_serial_simulation_that_applies_gradients_late(ranks: Ranks, world: int) -> None:
    for case, row in ran(ranks, world):
        assert row["difference"] <= EXACT, case
        assert row["losses"] <= EXACT, case


@pytest.mark.parametrize("world", WORLDS)
def test_the_ledger_of_a_full_step_is_the_predicted_one(ranks: Ranks, world: int) -> None:
    for case, row in ran(ranks, world):
        assert row["ledger"] == [], case


def test_micro_batches_that_count_nothing_are_skipped_by_every_stage(ranks: Ranks) -> None:
    case = ("short", 'pp(2, "pipedream", micro=4) * dp(2)', 4, [])
    for (row,) in ranks(BESIDE, {"cases": [case]}, ranks=4):
        assert row["difference"] <= EXACT
        # Two of four steps have two samples, so two of their four micro-batches are empty.
        assert row["updates"] == 4 * 4 - 2 * 2


def test_every_stage_is_as_late_as_there_are_stages_behind_it_and_keeps_as_many_versions(ranks: Ranks) -> None:
    for stages in (2, 3, 4):
        case = ("adamw", f'pp({stages}, "pipedream", micro=6)', 4, [2])
        for (row,) in ranks(BESIDE, {"cases": [case]}, ranks=stages):
            late = stages - 1 - row["stage"]
            # Each of the two fillings begins with updates that are less late.
            filling = [[updates, 2] for updates in range(late)]
            assert row["staleness"] == [*filling, [late, 24 - 2 * late]]
            assert row["versions"] == row["in_flight"] == late + 1
            assert row["updates"] == 24


def test_the_pipeline_stays_full_between_steps(ranks: Ranks) -> None:
    case = ("adamw", 'pp(3, "pipedream", micro=4)', 3, [])
    for (row,) in ranks(BESIDE, {"cases": [case]}, ranks=3):
        assert row["still_out"] == 2 - row["stage"]


@pytest.mark.parametrize("stages", [2, 3])
def test_no_rank_waits_at_the_end_of_a_step_for_ranks_behind_it(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    arguments = {"strategy": f'pp({stages}, "pipedream", micro=4)', "folder": str(tmp_path)}
    # A rank that did wait would wait for ever.
    assert ranks(f"{TARGETS}:first_ahead_of_last", arguments, ranks=stages, timeout_s=40) == [3] * stages


def by_layer(seen: list[Any]) -> dict[str, dict[str, list[float]]]:
    """Layer -> pass -> the weights it was given, one after the other."""
    found: dict[str, dict[str, list[float]]] = {}
    for how, layer, weight in seen:
        found.setdefault(layer, {"forward": [], "backward": []})[how].append(weight)
    return found


@pytest.mark.parametrize("more", ["", ' * recompute("full")', ' * recompute("selective")'])
@pytest.mark.parametrize("predict", ["False", "True"])
def test_forward_and_backward_of_a_micro_batch_see_the_same_weights(ranks: Ranks, more: str, predict: str) -> None:
    strategy = f'pp(3, "pipedream", micro=4, predict={predict}){more}'
    seen = ranks(f"{TARGETS}:saved_weights", {"job": "watched", "strategy": strategy, "steps": 4}, ranks=3)
    layers = 0
    for rank in seen:
        late = 2 - rank["stage"]
        for passes in by_layer(rank["seen"]).values():
            layers += 1
            assert len(passes["backward"]) == 16
            # A recomputation is a second forward, just before the backward that it serves.
            assert sorted(passes["forward"]) == sorted(passes["backward"] * (2 if more else 1))
            # Weights do change between micro-batches, or all of this would say nothing.
            assert len(set(passes["backward"])) == 16 - late
            if not more:
                assert passes["forward"] == passes["backward"]
    assert layers == 5


@pytest.mark.parametrize("predict", ["False", "True"])
def test_whatever_autograd_saved_in_forward_is_unchanged_in_backward(ranks: Ranks, predict: str) -> None:
    strategy = f'pp(3, "pipedream", micro=4, predict={predict})'
    for rank in ranks(f"{TARGETS}:saved_weights", {"job": "adamw", "strategy": strategy, "steps": 4}, ranks=3):
        assert rank["saved"] > 16
        assert rank["changed"] == 0


@pytest.mark.parametrize("more", ["", ' * recompute("full")'])
def test_a_backward_that_saw_the_newest_weights_would_be_noticed(ranks: Ranks, more: str) -> None:
    strategy = f'pp(2, "pipedream", micro=4){more}'
    arguments = {"job": "watched", "strategy": strategy, "steps": 3, "fault": True}
    first = ranks(f"{TARGETS}:saved_weights", arguments, ranks=2)[0]
    for passes in by_layer(first["seen"]).values():
        assert sorted(passes["forward"]) != sorted(passes["backward"] * (2 if more else 1))
    assert first["changed"] > 0 or more
    rows = ranks(BESIDE, {"cases": [("adamw", strategy, 3, [])], "fault": True}, ranks=2)
    assert max(row["difference"] for (row,) in rows) > 1e6 * EXACT


def test_prediction_changes_the_training_and_only_of_stages_that_are_late(ranks: Ranks) -> None:
    plain, ahead = (
        ranks(
            f"{TARGETS}:saved_weights",
            {"job": "watched", "strategy": f'pp(2, "pipedream", micro=4, predict={told})', "steps": 2},
            ranks=2,
        )
        for told in (False, True)
    )
    for layer, passes in by_layer(plain[0]["seen"]).items():
        others = by_layer(ahead[0]["seen"])[layer]["forward"]
        # The first two micro-batches come before the first update, so nothing can be told from it.
        assert passes["forward"][:2] == others[:2]
        assert all(a != b for a, b in zip(passes["forward"][2:], others[2:], strict=True))
    # The last stage has nothing to predict: until it meets what the first has predicted, it goes on as before.
    for layer, passes in by_layer(plain[1]["seen"]).items():
        assert passes["forward"][:3] == by_layer(ahead[1]["seen"])[layer]["forward"][:3]


@pytest.mark.parametrize("strategy", ['pp(2, "pipedream", micro=4)', 'pp(3, "pipedream", micro=2)'])
@pytest.mark.parametrize(
    ("job", "what"), [("exploding", "the loss is nan"), ("steep", "the norm of the gradient is nan")]
)
def test_what_is_no_number_stops_all_ranks_together_and_reaches_no_parameter(
    ranks: Ranks, job: str, what: str, strategy: str
) -> None:
    world = parse(strategy).world
    seen = ranks(f"{TARGETS}:no_number", {"job": job, "strategy": strategy, "steps": 6}, ranks=world)
    assert len({row["done"] for row in seen}) == 1
    assert len({row["said"] for row in seen}) == 1
    assert seen[0]["said"]
    assert what in seen[0]["said"]
    assert all(row["finite"] for row in seen)


def test_a_weight_that_two_stages_use_is_refused_by_name(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"stages 0 and 1 share embed\.weight"):
        ranks(f"{TARGETS}:no_number", {"job": "tied", "strategy": 'pp(2, "pipedream")', "steps": 1}, ranks=2)


def train(ranks: Ranks, folder: Path, strategy: str, **changes: Any) -> dict[str, Any]:
    arguments = {"job": f"{JOBS}:validated", "strategy": strategy, "folder": str(folder), "gate": False, **changes}
    outcome: dict[str, Any] = ranks(TRAIN, arguments, ranks=parse(strategy).world)[0]
    return outcome


@pytest.mark.parametrize("predict", ["False", "True"])
def test_a_resumed_run_goes_on_to_the_bit(ranks: Ranks, tmp_path: Path, predict: str) -> None:
    strategy = f'pp(2, "pipedream", micro=4, predict={predict})'
    train(ranks, tmp_path / "whole", strategy, checkpoint_every=3)
    train(ranks, tmp_path / "parts", strategy, checkpoint_every=3, steps=6)
    train(ranks, tmp_path / "parts", strategy, checkpoint_every=3, resume=str(tmp_path / "parts"))
    assert curve(tmp_path / "parts", "validation.jsonl") == curve(tmp_path / "whole", "validation.jsonl")
    assert checkpoint_bytes(tmp_path / "parts", 8) == checkpoint_bytes(tmp_path / "whole", 8)
    # Drained micro-batches are told by the first step after, which a resumed run has not seen; all others agree.
    whole, parts = dict(curve(tmp_path / "whole")), dict(curve(tmp_path / "parts"))
    assert {step for step in whole if whole[step] != parts[step]} <= {7}


def test_checkpoints_go_from_pipedream_to_other_strategies_and_back(ranks: Ranks, tmp_path: Path) -> None:
    path = ['pp(2, "pipedream", micro=4)', "dp(2, zero=3)", 'pp(3, "pipedream", micro=4)', "serial"]
    for number, strategy in enumerate(path):
        resume = {"resume": str(tmp_path)} if number else {}
        outcome = train(ranks, tmp_path, strategy, checkpoint_every=2, steps=2 + 2 * number, **resume)
        assert outcome["step"] == 2 + 2 * number
    losses = [loss for _, loss in curve(tmp_path)]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_the_record_of_a_run_tells_the_staleness_of_every_stage(ranks: Ranks, tmp_path: Path) -> None:
    outcome = train(ranks, tmp_path, 'pp(3, "pipedream", micro=4) * dp(2)', evaluate_every=0)
    assert outcome["staleness"] == [{"0": 1, "1": 1, "2": 30}, {"0": 1, "1": 31}, {"0": 32}]
    kept = json.loads((tmp_path / "run.json").read_text())["summary"]
    assert kept["staleness"] == outcome["staleness"]
    counted, predicted = Ledger.from_json(outcome["ledger"]), Ledger.from_json(outcome["predicted"])
    assert counted.differences(predicted) == []
    assert "staleness" not in train(ranks, tmp_path / "flushed", 'pp(2, "1f1b", micro=4)', steps=2)


def test_a_stop_is_heard_by_all_stages_in_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    arguments = {
        "job": f"{JOBS}:long",
        "strategy": 'pp(2, "pipedream", micro=4)',
        "folder": str(tmp_path),
        "stop_at": 5,
        "checkpoint_every": 100,
        "gate": False,
    }
    outcomes = ranks("distributed.training_targets:train_until", arguments, ranks=2)
    assert [(outcome["status"], outcome["step"]) for outcome in outcomes] == [("stopped", 5)] * 2
    assert (tmp_path / "checkpoints" / "step-00000005").is_dir()


@pytest.mark.parametrize("strategy", ['pp(2, "pipedream", micro=4) * dp(2)', 'pp(4, "pipedream", micro=2)'])
def test_verify_holds_it_to_its_band_and_never_calls_it_exact(strategy: str) -> None:
    certificate = verify(f"{JOBS}:long", parse(strategy), steps=4)
    assert certificate.passed
    assert certificate.contract == f"bounded({parse(strategy).axes[0].size - 1})"
    assert 0 < certificate.max_rel_diff <= certificate.tolerance == 0.05
    assert certificate.ledger_matches
    # Whatever was asked for, the pipeline is filled several times over.
    assert certificate.steps * parse(strategy).micro_batches >= 8 * parse(strategy).axes[0].size


def test_verify_proves_a_pipeline_of_one_stage_exact() -> None:
    certificate = verify(f"{JOBS}:adamw", parse('pp(1, "pipedream", micro=4) * dp(2)'), steps=3)
    assert certificate.passed
    assert certificate.contract == "exact"
    assert certificate.max_rel_diff <= EXACT


def test_the_losses_told_in_a_step_are_all_but_those_on_their_way_back() -> None:
    assert [micros_reported(ranks=3, micro=4, steps=steps) for steps in range(4)] == [0, 2, 6, 10]
    assert [micros_reported(ranks=1, micro=4, steps=steps) for steps in range(3)] == [0, 4, 8]
    # Fewer micro-batches than ranks: the loss of the step's first is waited for.
    assert [micros_reported(ranks=4, micro=2, steps=steps) for steps in range(4)] == [0, 1, 3, 5]
    assert [micros_reported(ranks=9, micro=1, steps=steps) for steps in range(3)] == [0, 1, 2]


def test_recomputation_across_steps_draws_the_masks_of_its_forward(ranks: Ranks) -> None:
    """Micro-batches of one step have their backward in the next: what dropout drew must still be known."""
    job = str(Path(__file__).parent / "jobs" / "odd.py:dropout_inside")
    pipe = 'pp(2, "pipedream", micro=2)'
    asked = {"job": job, "strategies": [pipe, f'{pipe} * recompute("full")'], "steps": 6}
    for plain, recomputed in ranks(f"{TARGETS}:curves", asked, ranks=2):
        assert recomputed == pytest.approx(plain, rel=1e-12)
