"""An island that is killed: the others go on among themselves, as a simulation of fewer islands says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.opening import open_checkpoint
from shoal.job import load_job, share
from shoal.launch import RankFailed
from shoal.runtime.step import build_model
from shoal.strategy import parse
from shoal.strategy.islands import islands
from shoal.training.entry import train_run
from shoal.training.record.run import RUN, read_json

Ranks = Callable[..., list[Any]]
LOOSE = str(Path(__file__).parent / "jobs" / "loose.py")
THREE = "dp(3, sync=local(4))"
KILLED = "distributed.island_targets:train_and_be_killed"


def simulated(islands_at: Callable[[int], int], *, counted: bool = False) -> dict[str, torch.Tensor]:
    """Local SGD of the loose job in plain PyTorch: `islands_at(step)` islands split each batch. `counted`: those that
    are lost are still part of the average before."""
    steps, every = 22, 4
    job = load_job(LOOSE)
    torch.manual_seed(job.seed)
    models = [build_model(job) for _ in range(islands_at(0))]
    optimizers = [job.optimizer([{"params": list(model.parameters())}]) for model in models]
    order, counter, counts = job.order(), 0, [0.0] * len(models)
    for step in range(steps):
        indices = order.indices(counter)
        counter = order.next(counter)
        for number in range(min(islands_at(step), len(models))):
            batch = job.train.batch(share(indices, rank=number, ranks=islands_at(step)))
            loss, count = job.loss(models[number](batch["x"]), batch)
            optimizers[number].zero_grad()
            (loss / count).backward()
            optimizers[number].step()
            counts[number] += float(count)
        if (step + 1) % every == 0 or step + 1 == steps:
            left = islands_at(step + 1)
            if not counted:
                del models[left:], counts[left:]
            with torch.no_grad():
                for params in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(p * (n / sum(counts)) for p, n in zip(params, counts, strict=True))
                    for param in params:
                        param.copy_(mean)
            del models[left:]
            counts = [0.0] * len(models)
    return models[0].state_dict()


def lose(ranks: Ranks, tmp_path: Path, killed: list[tuple[int, str, int]], strategy: str = THREE) -> Any:
    """A run with planted kills: rank 0's outcome, the messages, and the parameters of its last checkpoint."""
    chosen, folder, heard = parse(strategy), tmp_path / "run", list[Any]()
    asked = {"job": LOOSE, "strategy": strategy, "folder": str(folder), "gate": False, "checkpoint_every": 8}
    results = ranks(
        KILLED,
        {**asked, "killed": killed},
        ranks=chosen.world,
        islands=islands(chosen),
        on_message=lambda rank, message: heard.append(message),
    )
    return results, heard, last_values(folder)


def last_values(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters at the end of a run."""
    saved = open_checkpoint(folder / "checkpoints" / "step-00000022")
    shapes = {name: entry.shape for name, entry in saved.parameters.items()}
    return {name: saved.read_parameter(name, 0, prod(shape)).view(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("step: forward", 6),
        ("average", 2),
        ("evaluate: measured", 2),
        pytest.param("step: updated", 8, marks=pytest.mark.slow),
        pytest.param("save: written", 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_when_an_island_is_killed(ranks: Ranks, tmp_path: Path, point: str, times: int) -> None:
    """Killed in a step between two exchanges, before one, in the middle of one, and while all evaluate and save."""
    results, heard, values = lose(ranks, tmp_path, [(2, point, times)])
    assert results[2] is None
    assert results[0]["status"] == "finished"
    lost = {"ranks": [2], "step": 8, "reason": "rank 2 was killed by SIGKILL (often the kernel, out of memory)"}
    assert results[0]["lost"] == results[1]["lost"] == [lost]
    assert [message["step"] for message in heard if message["event"] == "lost"] == [8]
    assert read_json(tmp_path / "run" / RUN)["summary"]["lost"] == [lost]
    wanted = simulated(lambda step: 3 if step < 8 else 2, counted=point.startswith(("evaluate", "save")))
    unlike = simulated(lambda step: 3)
    for name, value in values.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    assert max(float((values[name] - unlike[name]).abs().max()) for name in values) > 1e-3


@pytest.mark.parametrize("point", ["step: forward", "evaluate: measured"])
def test_a_round_on_the_wire_is_sent_again_without_the_lost_island(ranks: Ranks, tmp_path: Path, point: str) -> None:
    """Killed between sending and applying, and while all evaluate with rounds on the wire."""
    strategy = "dp(3, sync=diloco(4, fragments=2, overlap=1, blend=0.5))"
    results, heard, values = lose(ranks, tmp_path, [(2, point, 5 if point.startswith("step") else 2)], strategy)
    assert results[2] is None
    assert results[0]["status"] == "finished"
    assert results[0]["lost"][0]["ranks"] == [2]
    assert [message["event"] for message in heard].count("lost") == 1
    assert all(bool(torch.isfinite(value).all()) for value in values.values())
    measured = read_json(tmp_path / "run" / RUN)["summary"]["consistency"]
    assert measured["rounds"] >= 9
    assert 0 < measured["spread"] <= measured["widest_spread"] < 1
    assert measured["saved_bytes"] > 0


def test_the_rest_of_an_island_ends_with_its_killed_rank(ranks: Ranks, tmp_path: Path) -> None:
    results, _, values = lose(ranks, tmp_path, [(5, "step: backward done", 10)], "dp(3, sync=local(4)) * dp(2, zero=3)")
    assert [result is None for result in results] == [False] * 4 + [True] * 2
    assert results[3]["lost"][0]["ranks"] == [4, 5]
    wanted = simulated(lambda step: 3 if step < 12 else 2)
    for name, value in values.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_one_island_is_enough(ranks: Ranks, tmp_path: Path) -> None:
    results, _, _ = lose(ranks, tmp_path, [(1, "step: forward", 6), (2, "step: forward", 14)])
    assert [(loss["ranks"], loss["step"]) for loss in results[0]["lost"]] == [([1], 8), ([2], 16)]
    assert results[0]["status"] == "finished"


def test_a_checkpoint_after_the_loss_is_one_of_the_islands_that_are_left(ranks: Ranks, tmp_path: Path) -> None:
    _, _, values = lose(ranks, tmp_path, [(1, "step: forward", 6)])
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000016", again / "checkpoints" / "step-00000016")
    asked = {
        "job": LOOSE,
        "strategy": "dp(2, sync=local(4))",
        "folder": str(again),
        "gate": False,
        "checkpoint_every": 8,
        "resume": str(again / "checkpoints" / "step-00000016"),
    }
    assert ranks(train_run, asked, ranks=2)[0]["status"] == "finished"
    resumed = last_values(again)
    assert all(torch.equal(resumed[name], value) for name, value in values.items())


def test_without_the_first_island_the_run_ends(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0 was killed by SIGKILL"):
        lose(ranks, tmp_path, [(0, "step: forward", 6)])
