"""An emulated link takes the time of the real thing: two network namespaces that the kernel limits to the same rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks._hosts import torchrun, two_hosts, why_not

from cli.command import Place

Ranks = Callable[..., list[Any]]

TRIES = 3
"""Whatever else the machine does makes either side slower, never faster: the best of a few tries tells the link."""


@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("rate", "bits_per_s", "repeats"), [("100Mb/s", 1e8, 3), ("1Gb/s", 1e9, 30)])
def test_emulated_links_take_the_time_of_hosts_that_the_kernel_limits(
    rate: str, bits_per_s: float, repeats: int, tmp_path: Any, ranks: Ranks
) -> None:
    reason = why_not(limited=True)
    if reason is not None:
        pytest.skip(reason)
    place, into = Place(folder=tmp_path), tmp_path / "times.json"
    settings = {"repeats": repeats, "emulate": f"2x1, 10us, 20GB/s | 50us, {rate}"}
    words = ["distributed.link_targets", json.dumps({"repeats": repeats, "into": str(into)})]
    real: dict[str, float] = {}
    emulated: dict[str, float] = {}
    for _ in range(TRIES):
        with two_hosts(bits_per_s=bits_per_s) as hosts:
            ended = torchrun(hosts, words, ranks_a_host=1, environment=place.environment(), timeout_s=60)
        assert [each.returncode for each in ended] == [0, 0], ended[0].stderr + ended[1].stderr
        _keep_best(real, json.loads(into.read_text()))
        _keep_best(emulated, ranks("distributed.link_targets:times_over_link", settings, ranks=2)[0])
        apart = {name: emulated[name] / real[name] for name in real if abs(emulated[name] / real[name] - 1) > 0.25}
        if not apart:
            break
    place.require_clean()
    assert not apart, f"emulated over real: {apart}; real in ms: {real}"
    assert real["all_reduce 4000000"] >= 4_000_000 * 8 / bits_per_s * 1000, "the kernel has limited nothing"


def _keep_best(best: dict[str, float], more: dict[str, float]) -> None:
    for name, milliseconds in more.items():
        best[name] = min(milliseconds, best.get(name, milliseconds))
