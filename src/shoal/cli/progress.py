"""How a training run looks: lines for a log, a live bar for a terminal, and a summary at the end."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any


def plain_lines() -> Any:
    """Progress for a log: about one line in five seconds, and everything that is not a step."""
    last = [0.0]

    def line(message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "step":
            if time.monotonic() - last[0] > 5 or message["step"] == message["steps"]:
                last[0] = time.monotonic()
                print(
                    f"{of_member(message)}step {message['step']}/{message['steps']}  loss {message['loss']:.4f}"
                    f"  {1000 * message['step_s']:.0f} ms  {rate(message)}"
                    f"  {message['memory_bytes'] / 2**20:.0f} MiB{consistency(message)}",
                    file=sys.stderr,
                    flush=True,
                )
        elif event in _WORDS:
            print(of_member(message) + _WORDS[event](message), file=sys.stderr, flush=True)

    return line


def of_member(message: dict[str, Any]) -> str:
    """Which run of an ensemble a message is from."""
    member = message.get("member")
    return "" if member is None else f"{member}: " if isinstance(member, str) else f"member {member}: "


def members(message: dict[str, Any]) -> str:
    """What the members of an ensemble reach: alone, on average, together, and the student."""
    lines = [f"member {number}: {_numbers(row)}" for number, row in enumerate(message["alone"])]
    lines += [f"mean member: {_numbers(message['mean_alone'])}"]
    lines += [f"together ({message['combined']}): {_numbers(message['together'])}"]
    lines += [f"student: {_numbers(message['student'])}"] if message.get("student") else []
    return "\n".join(lines)


def rate(row: dict[str, Any]) -> str:
    """How fast a step was: tokens where the loss counts them, otherwise samples; MFU and learning rate where known."""
    tokens, mfu, lr = row.get("tokens_per_s"), row.get("mfu"), row.get("lr")
    found = f"{row['samples_per_s']:.0f} samples/s" if tokens is None else f"{tokens:,.0f} tokens/s"
    return found + ("" if mfu is None else f"  MFU {mfu:.1%}") + ("" if lr is None else f"  lr {lr:.3g}")


def consistency(row: dict[str, Any]) -> str:
    """How far apart replicas are that do not step together, from a step's row; nothing for all others."""
    shown = {"spread": "spread {:.1e}", "staleness": "staleness {:.1f}", "ahead": "ahead {:.0f}"}
    return "".join("  " + text.format(row[name]) for name, text in shown.items() if name in row)


def _numbers(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "metrics": lambda m: f"validation at step {m['step']}: {_numbers(m['metrics'])}",
    "checkpoint": lambda m: f"checkpoint {m['path']}",
    "lost": lambda m: f"warning: {m['text']}",
    "restored": lambda m: f"warning: {m['text']}",
    "members": members,
    "joined": lambda m: m["text"],
    "note": lambda m: m["text"],
    "warning": lambda m: f"warning: {m['text']}",
    "stopping": lambda m: "stopping after this step and writing a checkpoint (Ctrl-C again to end at once)",
}


class LiveProgress:
    """The bar on a terminal: loss, step time, throughput, memory, time left. It appears with the first step."""

    def __init__(self, strategy: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[ms]} ms  {task.fields[rate]}"),
            TextColumn("{task.fields[memory]}  left"),
            TimeRemainingColumn(),
        )
        self.strategy = strategy
        self.task: Any = None

    def message(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "step" and message.get("member") not in (None, 0):
            return  # The bar is the first member's: all make the same steps.
        if event == "step":
            if self.task is None:
                nothing: dict[str, Any] = {"loss": "-", "ms": "-", "rate": "-", "memory": "-"}
                self.task = self.progress.add_task(self.strategy, total=message["steps"], **nothing)
                self.progress.start()
            self.progress.update(
                self.task,
                completed=message["step"],
                loss=f"{message['loss']:.4f}",
                ms=f"{1000 * message['step_s']:.0f}",
                rate=rate(message),
                memory=f"{message['memory_bytes'] / 2**20:.0f} MiB{consistency(message)}",
            )
        elif event in _WORDS:
            text = of_member(message) + _WORDS[event](message)
            self.progress.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def summary(outcome: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    rows = {
        "status": f"{outcome['status']} after {outcome['step']} steps",
        "strategy": f"{outcome['strategy']}  ({outcome['world']} rank{'s' if outcome['world'] != 1 else ''})",
    }
    if outcome["loss"] is not None:
        rows["loss"] = f"{outcome['loss']:.4f}"
    rows |= {f"validation {name}": f"{value:.4f}" for name, value in outcome["metrics"].items()}
    if outcome.get("alone"):
        rows |= {f"member {number}": _numbers(row) for number, row in enumerate(outcome["alone"])}
        rows["mean member"] = _numbers(outcome["mean_alone"])
        rows["together"] = f"{_numbers(outcome['together'])}  ({outcome['combined']})"
    if outcome.get("student"):
        rows["student"] = _numbers(outcome["student"])
    if outcome["time_to_target_s"] is not None:
        seconds, steps = outcome["time_to_target_s"], outcome["steps_to_target"]
        rows["target"] = f"reached after {seconds:.1f} s of training, {steps} steps"
    if outcome["step_s"] is not None:
        rows["step"] = f"{1000 * outcome['step_s']:.0f} ms"
    if outcome.get("peak_of"):
        flops = outcome["flops_per_sample"] * outcome["global_batch"] / (outcome["step_s"] or math.inf)
        rows["MFU"] = f"{flops / outcome['peak_flops']:.1%} of {outcome['peak_of']}"
    if outcome.get("critical_batch") is not None:
        used = f"this run used {outcome['global_batch']}"
        rows["critical batch"] = f"about {outcome['critical_batch']:.0f} samples by the gradient noise; {used}"
    if outcome.get("ended"):
        rows["ended"] = outcome["ended"]
    if outcome.get("best"):
        rows["best"] = ", ".join(
            "  ".join(f"{name} {value:.6g}" if name != "step" else f"step {value}:" for name, value in row.items())
            for row in outcome["best"]
        )
    rows["sent in a step"] = f"{outcome['sent_bytes'] / 1e6:.2f} MB by each rank"
    rows["peak memory"] = f"{outcome['memory_bytes'] / 2**20:.0f} MiB a rank"
    for what, row in (outcome.get("offload") or {}).items():
        where = "on disk" if row["to"] == "disk" else "in host memory"
        rows[f"offloaded {what}"] = (
            f"{row['held_bytes'] / 1e6:.1f} MB wait {where} on each rank, "
            f"{row['in_use_bytes'] / 1e6:.1f} MB are in use; steps waited {row['waited_s']:.1f} s for them"
        )
    from shoal.api.explain_run import first_cause

    if held := first_cause(outcome):
        rows["held back by"] = held
    rows["run"] = outcome["folder"]
    if outcome["status"] == "stopped" and outcome["saved_step"] is not None:
        rows["go on with"] = f"shoal train --resume {outcome['folder']}"
    console, width = Console(highlight=False), max(map(len, rows)) + 2
    for name, value in rows.items():
        console.print(Text.assemble((name.ljust(width), "dim"), value), soft_wrap=True)
