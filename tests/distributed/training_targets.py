"""What the tests of training run on real ranks: the training loop itself, and ways to look at or disturb it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open

from shoal.launch.channel import Channel
from shoal.training.entry import train_run


def train_and_tell_pid(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The training loop of a rank that first says which process it is."""
    channel.say({"event": "process", "pid": os.getpid()})
    return train_run(arguments, channel)


def curve(folder: Path, name: str = "steps.jsonl") -> list[tuple[int, Any]]:
    """(step, loss) of every step, or (step, metrics) of every evaluation."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(row["step"], row.get("metrics", row.get("loss"))) for row in rows]


def checkpoint_bytes(folder: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint, by the name of its file and its own."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            found |= {f"{file.name}/{key}": tensors.get_tensor(key).tobytes() for key in tensors.keys()}  # noqa: SIM118
    return found


class _StopsAt:
    """A channel that asks rank 1 to stop in a certain step, as a signal would."""

    def __init__(self, channel: Channel, step: int) -> None:
        self._channel, self._step, self._asked = channel, step, 0
        self.rank, self.say = channel.rank, channel.say

    @property
    def stop_requested(self) -> bool:
        self._asked += 1  # Once a step.
        return self._channel.rank == 1 and self._asked == self._step


def train_until(arguments: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """The training loop, asked to stop in step `stop_at`."""
    return train_run(arguments, _StopsAt(channel, arguments.pop("stop_at")))
