"""Starting ranks: results, order, speed, surroundings, messages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from distributed import targets
from shoal.launch import RankFailed, run_ranks, warm_up

Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_results_come_back_in_the_order_of_ranks(ranks: Ranks, number: int) -> None:
    results = ranks("distributed.targets:add_up", ranks=number)
    assert [result["rank"] for result in results] == list(range(number))
    assert {result["world"] for result in results} == {number}
    assert {result["sum"] for result in results} == {number * (number - 1) / 2}


def test_a_second_call_forks_from_the_same_server(ranks: Ranks) -> None:
    ranks("distributed.targets:add_up", ranks=2)
    start_s = time.monotonic()
    ranks("distributed.targets:add_up", ranks=2)
    assert time.monotonic() - start_s < 1.0


@pytest.mark.parametrize(
    "value",
    [None, "", "ünï ✂ \u2028 \x00", 10**40, -0.0, 1e308, [], {"": {"deep": [[[1]]]}}, "x" * 3_000_000],
)
def test_arguments_and_results_travel_unchanged(ranks: Ranks, value: Any) -> None:
    assert ranks("distributed.targets:echo", {"value": value}, ranks=2) == [value, value]


def test_a_result_that_is_not_json_is_that_ranks_failure(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"TypeError.*Tensor"):
        ranks("distributed.targets:not_json", ranks=2)


@pytest.mark.parametrize("target", ["distributed.targets", ":f", "no_such_module:f", "distributed.targets:no_such"])
def test_a_target_that_is_not_there_is_named(ranks: Ranks, target: str) -> None:
    with pytest.raises(RankFailed) as caught:
        ranks(target, ranks=2)
    assert target.partition(":")[2] in str(caught.value) or target.partition(":")[0] in str(caught.value)


def test_less_than_one_rank_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="ranks is 0"):
        run_ranks("distributed.targets:add_up", {}, ranks=0)


def test_ranks_share_the_parents_directory_and_meet_in_a_private_one(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = ranks("distributed.targets:surroundings", ranks=2)
    assert {each["directory"] for each in found} == {str(tmp_path)}
    assert {each["is_local"] for each in found} == {True}
    assert not Path(found[0]["rendezvous"]).parent.exists()


def test_one_thread_a_rank_unless_asked(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks("distributed.targets:surroundings", ranks=1)[0]["threads"] == 1
    assert ranks("distributed.targets:surroundings", ranks=1, threads_per_rank=2)[0]["threads"] == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ranks("distributed.targets:surroundings", ranks=1)[0]["threads"] == 3


def test_a_variable_that_libraries_read_at_start_is_there_at_their_start(ranks: Ranks) -> None:
    setting = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    found = ranks("distributed.targets:surroundings", {"name": "MALLOC_MMAP_THRESHOLD_"}, ranks=1, environment=setting)
    assert found[0]["asked"] == "65536"
    assert "MALLOC_MMAP_THRESHOLD_=65536" in found[0]["started_with"].split("\x00")


def test_what_the_server_has_loaded_no_rank_imports_again(ranks: Ranks) -> None:
    own = {"environment": {"PYTHON_OF_THIS_TEST": "1"}}  # A server of its own, in which nothing is loaded yet.
    names = {"names": ["distributed.loads", "distributed.fails_to_load"]}
    assert ranks(targets.modules_loaded, names, ranks=2, **own) == [[], []]
    warm_up("distributed.fails_to_load", "distributed.loads", **own)
    assert ranks(targets.modules_loaded, names, ranks=2, **own) == [["distributed.loads"]] * 2


def test_a_server_that_still_loads_ends_with_its_parent_at_once(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time; open('loading', 'w').close(); time.sleep(600)")
    code = (
        "import pathlib, time; from shoal.launch import warm_up; warm_up('endless')\n"
        "while not pathlib.Path('loading').exists(): time.sleep(0.01)\n"
        "before_s = time.monotonic(); import shoal.launch.forkserver as f; f.stop_servers()\n"
        "print(time.monotonic() - before_s)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0


def test_other_variables_reach_ranks_without_a_new_server(ranks: Ranks) -> None:
    pids = set()
    for value in ("one", "two ü"):
        found = ranks(
            "distributed.targets:surroundings",
            {"name": "OF_A_TEST"},
            ranks=1,
            environment={"OF_A_TEST": value},
        )
        assert found[0]["asked"] == value
        pids.add(found[0]["started_with"])
    assert len(pids) == 1


def test_a_slow_listener_neither_blocks_a_rank_nor_loses_a_message(ranks: Ranks) -> None:
    heard: dict[int, list[int]] = {0: [], 1: []}

    def listen(rank: int, message: dict[str, Any]) -> None:
        if not heard[rank]:
            time.sleep(1.0)
        heard[rank].append(message["number"])

    spent_s = ranks("distributed.targets:say_much", {"messages": 2000}, ranks=2, on_message=listen)
    assert heard == {0: list(range(2000)), 1: list(range(2000))}
    assert max(spent_s) < 1.0


def test_ranks_may_leave_and_join_again(ranks: Ranks) -> None:
    assert ranks("distributed.targets:join_and_leave_twice", ranks=3) == [[9.0, 9.0]] * 3


def test_nobody_leaves_while_a_peer_still_reads(ranks: Ranks) -> None:
    for _ in range(5):
        assert ranks("distributed.targets:many_pending_at_the_end", ranks=3) == [1.0, 1.0, 1.0]


def test_a_rank_ends_with_its_result_whatever_it_left_running(ranks: Ranks) -> None:
    assert ranks("distributed.targets:leave_threads_behind", ranks=2) == ["result", "result"]


def test_a_listener_that_raises_ends_the_ranks(ranks: Ranks) -> None:
    pids = []

    def listen(rank: int, message: dict[str, Any]) -> None:
        pids.append(message["pid"])
        if len(pids) == 2:
            raise LookupError("in the listener")

    with pytest.raises(LookupError, match="in the listener"):
        ranks("distributed.targets:until_stopped", ranks=2, on_message=listen)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not [name for name in os.listdir("/proc/self/fd") if _is_lost_pipe(name)]


def _is_lost_pipe(name: str) -> bool:
    try:
        return "shoal-ranks" in os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return False


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, shoal.launch.start; sys.exit('torch' in sys.modules)"
    paths = os.pathsep.join(path for path in sys.path if path)
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}).returncode == 0


def test_runs_side_by_side_in_threads_do_not_meet() -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run_ranks, "distributed.targets:add_up", {}, ranks=number) for number in (2, 3, 2)]
        assert [run.result(60)[0]["sum"] for run in runs] == [1.0, 3.0, 1.0]


def test_nothing_piles_up_over_many_runs(ranks: Ranks) -> None:
    ranks("distributed.targets:echo", {"value": 1}, ranks=2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        ranks("distributed.targets:echo", {"value": 1}, ranks=2)
    assert len(os.listdir("/proc/self/fd")) == before
