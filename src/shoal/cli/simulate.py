"""`shoal simulate`: one strategy on a cluster one does not have, printed, and drawn for Perfetto and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.api.plan import CannotPlan
from shoal.api.simulate import simulate
from shoal.api.simulate_servers import SimulatedServers
from shoal.cli.output import print_json, write_file
from shoal.planning.quantities import GB, seconds


def simulate_command(
    what: str, *, strategy: str, trace_file: str | None, svg_file: str | None, as_json: bool, **options: Any
) -> int:
    """Simulates, prints and draws."""
    found = simulate(what, strategy, **options)
    if isinstance(found, SimulatedServers):
        if trace_file is not None or svg_file is not None:
            raise CannotPlan(f"{strategy}: steps of parameter servers are not drawn; leave --perfetto and --svg out")
        print_json(found.to_json()) if as_json else print(found)
        return 0
    if trace_file is not None:
        write_file(found.to_perfetto(), trace_file, option="--perfetto")
    if svg_file is not None:
        write_file(found.to_svg(), svg_file, option="--svg")
    if as_json:
        print_json(found.to_json())
    else:
        _print(found.report, shape=found.shape, drawn=[each for each in (trace_file, svg_file) if each])
    return 0


def _print(report: dict[str, Any], *, shape: Any, drawn: Sequence[str]) -> None:
    times = np.array(report["step_s"])
    good = report["goodput"]
    tokens = report["global_batch"] * shape.sequence
    print(f"{report['strategy']}")
    print(
        f"  {report['model']} on {report['ranks']:,} ranks of {report['cluster']}, {report['global_batch']:,} "
        f"sequences a step; simulated as {report['classes']:,} class{'es' if report['classes'] > 1 else ''} of "
        f"replicas, {report['events']:,} passes"
    )
    print(f"  step       {seconds(report['undisturbed_s'])} undisturbed; by the formulas {seconds(report['price_s'])}")
    slower = times.mean() / report["undisturbed_s"] - 1
    if len(times) > 1 or abs(slower) > 1e-9:
        spread = f" over {len(times)} steps, {seconds(times.min())} to {seconds(times.max())}" if len(times) > 1 else ""
        print(f"  disturbed  {seconds(float(times.mean()))} ({slower:+.1%}){spread}")
    idle = f"  idle       ranks compute nothing in {report['idle']:.1%} of the passes' time"
    if f"{report['idle']:.1%}" != f"{report['idle_of_slowest']:.1%}":
        idle += f"; those of the slowest replica, which --svg shows, in {report['idle_of_slowest']:.1%}"
    print(idle)
    print(f"  memory     {report['memory_bytes'] / GB:.1f} GB{'' if report['fits'] else ': does not fit'}")
    print(f"  speed      {tokens / float(times.mean()):,.0f} tokens/s")
    print(
        f"  goodput    {good['part']:.1%} with a failure every {seconds(good['mtbf_s'])}, a checkpoint of "
        f"{seconds(good['checkpoint_s'])} every {good['steps_between_checkpoints']:,} steps, restarts of "
        f"{seconds(good['restart_s'])}"
    )
    for path in drawn:
        print(f"  drawn in   {path}")
