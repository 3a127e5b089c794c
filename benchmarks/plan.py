"""How fast plans are made: strategies estimated a second, all strategies of a large model, a simulated large step, and
the command from a cold start. Wall-clock time and processor time against each limit; the best of several rounds.

    python benchmarks/plan.py [--json] [--rounds 3]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from _report import arguments, report

from shoal.cluster import cluster
from shoal.estimate.simulate import Disturbance, Straggler, simulate_step
from shoal.planning.candidates import of_strategies
from shoal.planning.enumerate import enumerate_legal
from shoal.planning.legal import facts_of
from shoal.planning.price import price_candidates, step_costs_of
from shoal.planning.rank import make_plan, price_all, question_for
from shoal.shapes.presets import preset
from shoal.strategy import parse

LARGE = 'pp(64, micro=192) * dp(32, zero=1) * tp(8, sequence=True) * amp("bf16")'
COLD = ("plan", "gpt:175b", "--cluster", "dgx-a100", "--devices", "1024")
TELLING = """
import sys
from shoal.cli.main import run
try:
    run()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def best(do: Callable[[], Any], *, rounds: int) -> tuple[float, float, Any]:
    """(wall seconds, processor seconds, what it returned) of the quickest round."""
    found = []
    for _ in range(rounds):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        value = do()
        found.append((time.perf_counter() - wall_s, time.process_time() - cpu_s, value))
    return min(found, key=lambda each: each[0])


def cold(*, rounds: int) -> tuple[float, float, bool]:
    """(wall, processor, whether torch was imported) of the command in a process of its own."""
    found = []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", TELLING, *COLD],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        wall_s = time.perf_counter() - wall_s
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((wall_s, cpu_s, done.stderr.splitlines()[-1] == "True"))
    return min(found)


def main() -> None:
    given = arguments(__doc__ or "", lambda parser: parser.add_argument("--rounds", type=int, default=3))
    rows: list[dict[str, Any]] = []

    def enter(name: str, wall_s: float, cpu_s: float, *, limit_s: float | None, **more: Any) -> None:
        rows.append({"name": name, "wall_s": wall_s, "cpu_s": cpu_s, "limit_s": limit_s, **more})

    shape = preset("gpt:175b")
    question = question_for(shape, cluster("dgx-a100", devices=4096), global_batch=1536)
    legal = enumerate_legal(world=4096, facts=facts_of(shape, global_batch=1536), node=8)
    wall_s, cpu_s, priced = best(
        lambda: price_candidates(legal, shape=shape, cluster=question.cluster, everything=True), rounds=given.rounds
    )
    enter(
        "gpt:175b, 4,096 A100: time and memory of every row, fitting or not",
        wall_s,
        cpu_s,
        limit_s=None,
        strategies=len(priced),
        a_second=round(len(priced) / wall_s),
    )
    wall_s, cpu_s, priced = best(lambda: price_all(question), rounds=given.rounds)
    enter(
        "gpt:175b, 4,096 A100: all legal, enumerated and priced (time of those that fit)",
        wall_s,
        cpu_s,
        limit_s=2.0,
        strategies=len(priced),
        a_second=round(len(priced) / wall_s),
    )
    wall_s, cpu_s, plan = best(lambda: make_plan(question), rounds=given.rounds)
    enter("the same, ranked", wall_s, cpu_s, limit_s=2.0, strategies=len(plan.priced))

    large = of_strategies([parse(LARGE)], global_batch=32 * 192)
    costs = step_costs_of(large, shape=preset("gpt:1t"), cluster=cluster("dgx-a100", devices=16_384))
    assert costs.ranks == 16_384
    calm_s = best(lambda: simulate_step(costs), rounds=given.rounds)
    enter("gpt:1t, 16,384 ranks: a step simulated (one class)", calm_s[0], calm_s[1], limit_s=10.0)
    noisy = Disturbance(noise=0.02, stragglers=(Straggler(rank=5, factor=2.0),))
    wild_s = best(lambda: simulate_step(costs, noisy), rounds=given.rounds)
    enter("the same with random slow-downs (32 classes)", wild_s[0], wild_s[1], limit_s=10.0)

    wall_s, cpu_s, torch_there = cold(rounds=given.rounds)
    enter(
        f"shoal {' '.join(COLD)}, cold", wall_s, cpu_s, limit_s=3.0, torch="imported" if torch_there else "not imported"
    )
    for row in rows:
        row["met"] = "" if row["limit_s"] is None else "yes" if row["wall_s"] <= row["limit_s"] else "no"
    report(
        rows,
        title="Plans and simulations",
        as_json=given.json,
        notes=[f"the quickest of {given.rounds} rounds; one thread"],
    )


if __name__ == "__main__":
    main()
