"""One job across two hosts: it trains as on one, and the kernel counts the bytes that the ledger says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks._hosts import Host, torchrun, two_hosts, why_not

from cli.command import Place
from distributed.training_targets import curve
from shoal.comm.ledger import Ledger
from shoal.training.entry import train_run

Ranks = Callable[..., list[Any]]

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

STEPS = 14
FIRST_COUNTED = 3
"""The step from which on bytes are counted: by then the connections stand."""

# A model of some 2 MB, so that headers are small beside it. The schedule is asked at the start of every step, and
# then writes down how many bytes this host has sent to the other.
JOB = """
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.tasks.language import language

def schedule(step):
    time.sleep(0.05)  # What the kernel has taken leaves the host a moment later.
    counter = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "lo") / "statistics" / "tx_bytes"
    with open(f"{folder}/sent-{{os.environ['RANK']}}", "a") as file:
        file.write(f"{{step}} {{counter.read_text()}}")
    {first_of_schedule}
    return 1.0

config = GPTConfig(layers=3, heads=4, hidden=128, sequence=32)
job = replace(language("tiny"), name="two hosts", model=partial(GPT, config), schedule=schedule, steps={steps},
              evaluate_every=0, global_batch=8)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(folder=tmp_path)


def write_job(folder: Path, first_of_schedule: str = "pass") -> str:
    path = folder / "job.py"
    path.write_text(JOB.format(folder=folder, steps=STEPS, first_of_schedule=first_of_schedule))
    return str(path)


def bytes_sent_a_step(file: Path) -> float:
    """What the host's counter says, from the start of one step to that of a later one."""
    at_start: dict[int, int] = {}
    for line in file.read_text().splitlines():
        step, sent = map(int, line.split())
        at_start.setdefault(step, sent)
    last = max(at_start)
    assert last - FIRST_COUNTED >= 10
    return (at_start[last] - at_start[FIRST_COUNTED]) / (last - FIRST_COUNTED)


@pytest.mark.parametrize(
    ("strategy", "ranks_a_host", "between_hosts"),
    [
        pytest.param("dp(2)", 1, ["dp"], marks=pytest.mark.slow),
        pytest.param("dp(2, zero=3)", 1, ["dp"], marks=pytest.mark.slow),
        ("dp(2) * dp(2, zero=3)", 2, ["dp0"]),
    ],
)
def test_a_job_trains_across_hosts_and_the_kernel_counts_what_the_ledger_says(
    strategy: str, ranks_a_host: int, between_hosts: list[str], hosts: tuple[Host, Host], place: Place, ranks: Ranks
) -> None:
    job, run = write_job(place.folder), place.folder / "run"
    words = ["shoal", "train", job, "--strategy", strategy, "--folder", str(run), "--checkpoint-every", str(STEPS)]
    ended = torchrun(hosts, words, ranks_a_host=ranks_a_host, environment=place.environment(), timeout_s=120)
    place.require_clean()
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert f"finished after {STEPS} steps" in ended[0].stdout
    assert ended[1].stdout == ""

    ledgers = json.loads((run / "ledger.json").read_text())
    step = Ledger.from_json(ledgers["steady_step"])
    assert step.differences(Ledger.from_json(ledgers["predicted"])) == []
    counted = ranks_a_host * sum(step.by_axis()[axis].bytes for axis in between_hosts)
    assert counted > 1e6
    for host in range(2):
        measured = bytes_sent_a_step(place.folder / f"sent-{host * ranks_a_host}")
        assert measured == pytest.approx(counted, rel=0.05)

    alone = place.folder / "alone"
    settings = {"job": job, "strategy": strategy, "folder": str(alone), "checkpoint_every": 0, "gate": False}
    ranks(train_run, settings, ranks=2 * ranks_a_host)
    assert curve(run) == curve(alone)
    assert len(curve(run)) == STEPS
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-{STEPS:08d}"]


def test_a_rank_that_fails_is_named_on_its_host_and_ends_both(hosts: tuple[Host, Host], place: Place) -> None:
    fails = "if step == 5 and os.environ['RANK'] == '1': raise KeyError('a broken ünit')"
    job = write_job(place.folder, fails)
    words = ["shoal", "train", job, "--strategy", "dp(2)", "--folder", str(place.folder / "run")]
    ended = torchrun(hosts, words, ranks_a_host=1, environment=place.environment(), timeout_s=120)
    place.require_clean()
    assert all(each.returncode != 0 for each in ended)
    assert "shoal: rank 1 failed: KeyError: 'a broken ünit'" in ended[1].stderr
    assert "shoal: rank 0 is exiting because another rank failed" in ended[0].stderr


def test_the_namespaces_are_gone_afterwards() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as (first, second):
        assert Path("/run/netns", first.name).exists()
    assert not Path("/run/netns", first.name).exists()
    assert not Path("/run/netns", second.name).exists()
    assert not [name for name in os.listdir("/sys/class/net") if name in (first.interface, second.interface)]
