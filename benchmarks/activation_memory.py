"""Activation memory of a pipeline by schedule, beside the formula: micro-batches in flight times the bytes of one.

Micro-batches have one size, so that only their number grows: GPipe keeps all of them, 1F1B on rank r at most n - r.
The bytes of one come from a pipeline with a single micro-batch under the same recomputation. Held is what lives at the
end of a forward, gradients of parameters not counted: every storage that an operation of the step has made is followed
until it is freed, so that what recomputation keeps is seen as well as what autograd does. Beside it stands the peak of
resident memory over that between two steps, from an allocator that gives memory back; gradients, messages and
temporaries are in that one.

    python benchmarks/activation_memory.py [--micro 2,4,8] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _report import arguments, report
from memory import RETURNING, resident

SAMPLES = 2
"""In a micro-batch."""
SCHEDULES = ("gpipe", "1f1b")
RANKS = 2


class Living:
    """Bytes of the storages that operations have made and nobody has let go of yet."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._known: dict[int, Any] = {}

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self.sizes[key] = storage.nbytes()
            self._known[key] = weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.sizes.pop(key, None)
        self._known.pop(key, None)

    def bytes(self, *, without: list[Any]) -> int:
        left_out = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(size for key, size in self.sizes.items() if key not in left_out)


@contextmanager
def watching(living: Living) -> Iterator[None]:
    """Everything that operations return, in forward, backward and recomputation."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                    living.add(leaf)
            return out

    with Watch():
        yield


def held(settings: dict[str, Any], channel: Any) -> list[dict[str, Any]]:
    """On every rank, for every strategy: most bytes held at the end of a forward, micro-batches in flight, and the
    peak of resident memory in another step."""
    from peers.common import gpt_job, shoal_runner

    from shoal.launch.join import join, leave
    from shoal.strategy import parse

    me = join()
    rows = []
    for text in settings["strategies"]:
        job = gpt_job(settings["size"], batch=SAMPLES * parse(text).micro_batches, layers=4)
        runner, step = shoal_runner(job, text, me)
        for _ in range(2):
            step()
        rows.append(_measured(runner, step))
        runner.engine.close()
        del runner, step
        gc.collect()
        if me.rank == 0:
            channel.say({"doing": text})
    leave()
    return rows


def _measured(runner: Any, step: Any) -> dict[str, Any]:
    staged, parameters = runner.executor.staged, list(runner.engine.model.parameters())
    living, most = Living(), [0]
    run = staged.run

    def run_and_look(*args: Any) -> Any:
        answer = run(*args)
        gradients = [bucket.full for bucket in runner.engine.buckets if bucket.full is not None]
        most[0] = max(most[0], living.bytes(without=parameters + gradients))
        return answer

    staged.run = run_and_look
    with watching(living):
        step()
    staged.run = run
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return {
        "held": most[0],
        "in_flight": runner.executor.most_in_flight,
        "peak": max(0, resident("VmHWM") - before),
    }


def strategies(micros: list[int]) -> list[tuple[str, str, int]]:
    """(Strategy, the one with a single micro-batch that it is held against, micro-batches)."""
    found = []
    for schedule in SCHEDULES:
        for micro in micros:
            found.append((f"pp({RANKS}, '{schedule}', micro={micro})", f"pp({RANKS}, '1f1b', micro=1)", micro))
    for kind in ("selective", "full"):
        again = f" * recompute('{kind}')"
        found.append(
            (f"pp({RANKS}, '1f1b', micro={micros[-1]}){again}", f"pp({RANKS}, '1f1b', micro=1){again}", micros[-1])
        )
    return found


def in_flight(strategy: str, micro: int, rank: int) -> int:
    return micro if "gpipe" in strategy else min(micro, RANKS - rank)


def main() -> None:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--micro", default="2,4,8", help="numbers of micro-batches, with commas between")
        parser.add_argument("--quick", action="store_true", help="a tiny model: shows that all cases run, nothing else")

    asked = arguments(__doc__ or "", extend)
    from shoal.launch import run_ranks

    wanted = strategies([int(number) for number in asked.micro.split(",")])
    order = list(dict.fromkeys(name for strategy, alone, _ in wanted for name in (alone, strategy)))
    settings = {"strategies": order, "size": "tiny" if asked.quick else "small"}

    def told(rank: int, message: dict[str, Any]) -> None:
        print(f"\r{message['doing']:<60}", end="", file=sys.stderr, flush=True)

    found = run_ranks("activation_memory:held", settings, ranks=RANKS, environment=RETURNING, on_message=told)
    print(file=sys.stderr)
    rows = []
    for strategy, alone, micro in wanted:
        for rank in range(RANKS):
            one = found[rank][order.index(alone)]["held"]
            mine = found[rank][order.index(strategy)]
            flying = in_flight(strategy, micro, rank)
            rows.append(
                {
                    "name": strategy,
                    "rank": rank,
                    "in_flight": mine["in_flight"],
                    "formula_in_flight": flying,
                    "one_mb": round(one / 1e6, 3),
                    "formula_mb": round(flying * one / 1e6, 3),
                    "held_mb": round(mine["held"] / 1e6, 3),
                    "held_over_formula": round(mine["held"] / (flying * one), 3),
                    "peak_resident_mb": round(mine["peak"] / 1e6, 1),
                }
            )
    report(rows, title=f"Activations kept, micro-batches of {SAMPLES} samples", as_json=asked.json)


if __name__ == "__main__":
    main()
