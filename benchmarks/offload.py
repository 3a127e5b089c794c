"""What offload to disk frees and costs on this machine, beside what is estimated.

    python benchmarks/offload.py [--past-cache] [--steps 6] [--width 512] [--depth 24] [--batch 256]

A residual network under AdamW, on one rank, float32. "estimated" is the formula of `shoal/estimate/offload.py`, from
the phases of the run that offloads nothing and the throughput that is measured first. With --past-cache what is written
is on the disk before it counts as written, and leaves the host's cache: as where memory is really short.
"""

from __future__ import annotations

import argparse

from shoal.estimate.offload import StepPhases, offload_estimate
from shoal.launch import run_ranks

KINDS = ("optimizer", "parameters", "activations", "optimizer parameters")
MB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--past-cache", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--batch", type=int, default=256)
    asked = parser.parse_args()
    sizes = {"width": asked.width, "depth": asked.depth, "batch": asked.batch}
    common = {"past_cache": asked.past_cache, "sizes": sizes, "steps": asked.steps}
    speed = run_ranks("_offload:throughput", common, ranks=1)[0]
    print(f"disk: {speed['read'] / MB:,.0f} MB/s read, {speed['write'] / MB:,.0f} MB/s written\n")
    plain = run_ranks("_offload:measure", {**common, "strategy": "serial"}, ranks=1)[0]
    phases = StepPhases(
        forward_s=plain["step_s"] - plain["backward_s"] - plain["update_s"],
        backward_s=plain["backward_s"],
        update_s=plain["update_s"],
    )
    print("| offloaded | MB below | in use | peak MB | falls by | of below less in use | step ms | estimated |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    print(f"| nothing | | | {plain['peak_bytes'] / MB:.0f} | | | {1e3 * plain['step_s']:.0f} | |", flush=True)
    for kinds in KINDS:
        strategy = " * ".join(f'offload("{what}")' for what in kinds.split())
        found = run_ranks("_offload:measure", {**common, "strategy": strategy}, ranks=1)[0]
        rows = found["offload"]
        held = {what: rows[what]["held_bytes"] for what in rows}
        used = sum(row["in_use_bytes"] for row in rows.values())
        estimate = offload_estimate(
            phases,
            state_bytes=held.get("optimizer", 0),
            parameter_bytes=held.get("parameters", 0),
            activation_bytes=found["activation_bytes"],
            read_bytes_per_s=speed["read"],
            write_bytes_per_s=speed["write"],
        )
        falls, freed = plain["peak_bytes"] - found["peak_bytes"], sum(held.values()) - used
        print(
            f"| {kinds.replace(' ', ' and ')} | {sum(held.values()) / MB:.0f} | {used / MB:.0f} "
            f"| {found['peak_bytes'] / MB:.0f} | {falls / MB:.0f} | {100 * falls / freed:.0f}% "
            f"| {1e3 * found['step_s']:.0f} | {1e3 * estimate.step_s:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
