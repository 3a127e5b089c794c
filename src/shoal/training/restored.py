"""A run that takes up its last checkpoint by itself when it has lost a rank that the others cannot go on without.

Under servers, and where islands step by themselves, most ranks may be lost (`lost_islands.py`). Not a server, which has
a shard of the model, and not the first island, which keeps the order of the data and the record. What such a rank held
lies in the last checkpoint, and the shards of several servers only make one model if they are of one version. So all
ranks are started again from there, the lost one among them: what was learned since is learned once more, and no sample
of an epoch is left out or seen twice.

It is done once from each checkpoint. A rank that is lost again before the next one would be lost always.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.common.hindrance import without_killed
from shoal.launch import RankFailed, run_ranks
from shoal.launch.start import Target
from shoal.strategy import Strategy, parse
from shoal.strategy.islands import islands, losable
from shoal.strategy.seats import seats_of
from shoal.training.entry import train_run
from shoal.training.growing import grown, read_join
from shoal.training.options import TrainOptions
from shoal.training.record.run import RUN, RunBroken, read_json, write_json

Listener = Callable[[dict[str, Any]], None]


def is_restored(strategy: Strategy) -> bool:
    """Whether runs under a strategy take up their last checkpoint when a rank is killed that cannot be spared."""
    return seats_of(strategy) is not None or len(islands(strategy)) > 1


def train_restoring(
    options: TrainOptions,
    world: int,
    *,
    hang_after_s: float,
    on_message: Listener,
    target: Target | str = train_run,
    **more: Any,
) -> list[Any]:
    """The outcomes of all ranks. `target` and `more`, what it is given at the first start only, are for tests.

    Raises:
        RankFailed: A rank failed, or one was lost that cannot be restored.
    """
    strategy = parse(options.strategy or "serial")
    losses = _Losses(options, strategy, on_message)
    asked = read_join(options.join)
    full = strategy if asked is None else grown(strategy, asked.replicas)
    while True:
        try:
            outcomes = run_ranks(
                target,
                {**options.to_json(), **more},
                ranks=world,
                hang_after_s=hang_after_s,
                on_message=lambda rank, message: losses.listen(message),
                islands=losable(full),
                rejoin=options.rejoin,
                coming=full.world - world,
            )
        except RankFailed as error:
            options = losses.options_after(error, options)
            more = {}
            continue
        if losses.rows:
            outcomes[0] |= {"restored": losses.rows}
            _add_to_record(Path(options.folder or ""), losses.rows)
        return outcomes


class _Losses:
    """What a run has lost and restored."""

    def __init__(self, options: TrainOptions, strategy: Strategy, on_message: Listener) -> None:
        self.rows: list[dict[str, Any]] = []
        """For each loss: the rank and why, the steps that all had made and from which they went on, and the seconds
        until the next step was made."""
        self._strategy, self._folder, self._tell = strategy, Path(options.folder or "") / "checkpoints", on_message
        self._made, self._lost_s = self._newest(), 0.0

    def _newest(self) -> int:
        """Steps in the newest checkpoint."""
        found = self._folder.glob("step-" + 8 * "[0-9]" + "/checkpoint.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)

    def listen(self, message: dict[str, Any]) -> None:
        if message["event"] == "step":
            self._made = max(self._made, message["step"])
            if self.rows and self.rows[-1]["took_s"] is None:
                self.rows[-1]["took_s"] = time.monotonic() - self._lost_s
        self._tell(message)

    def options_after(self, error: RankFailed, options: TrainOptions) -> TrainOptions:
        """How ranks are started again; raises the error where they are not."""
        saved = self._newest()
        if not error.killed or not is_restored(self._strategy) or saved in (row["resumed_at"] for row in self.rows):
            raise error
        self._lost_s = time.monotonic()
        self._made = max(self._made, saved)  # By tickets the first rank may have had none of the last steps.
        self.rows.append(
            {
                "rank": error.rank,
                "reason": error.message,
                "step": self._made,
                "resumed_at": saved,
                "repeated_steps": self._made - saved,
                "took_s": None,
            }
        )
        whose = f"the checkpoint of step {saved}" if saved else "the start, since there is no checkpoint yet"
        again = self._made - saved
        rest = f"; {again} {'step is' if again == 1 else 'steps are'} made again" if again else ""
        text = f"{error.message} at step {self._made}: all ranks go on from {whose}{rest}"
        self._tell({"event": "restored", **self.rows[-1], "text": text})
        self._made = saved
        return replace(
            options,
            resume=str(self._folder.parent) if saved else None,
            checked=False,
            restored=True,
            fail=without_killed(options.fail, error.rank),
        )


def _add_to_record(folder: Path, rows: list[dict[str, Any]]) -> None:
    with contextlib.suppress(RunBroken, OSError):
        facts = read_json(folder / RUN)
        write_json(folder / RUN, {**facts, "summary": {**(facts["summary"] or {}), "restored": rows}})
