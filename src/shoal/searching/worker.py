"""A worker of a search: asks the study for a trial, trains it, reports its value, and asks again.

It is a process of its own, on any machine that reaches the storage. It gets its orders as a line of JSON and ends when
its standard input does: no worker survives the search that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import fail_stale_trials
from optuna.trial import FrozenTrial, TrialState

from shoal.job.space import load_space, point
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.population import PARENT, may_ask
from shoal.searching.predicted import predictor
from shoal.searching.proposal import ChangesModel, DrawingTrial, job_of
from shoal.searching.sampling import PlacedSampler, pruner_of, rungs, sampler_of
from shoal.searching.shared_weights import FOLDER, Chosen, learn_modules
from shoal.searching.study import (
    FINISHED,
    HEARTBEAT_S,
    REJECTED,
    SURPLUS,
    me,
    open_study,
    origin,
    queue_again,
    release_dead,
    slot,
    standing,
)
from shoal.searching.trial_run import (
    TrialDiverged,
    TrialFailed,
    TrialStopped,
    begin_with_copy,
    drop_checkpoints,
    folder_of,
    run_to,
    value_of,
)

ASK_AGAIN_S = 0.2
SAY_S = 0.2
MOST_REJECTED = 200
"""Proposals in a row that do not fit the memory limit."""
MOST_FAILED = 3
"""Trials that failed while none has succeeded."""


class Worker:
    """One worker's state."""

    def __init__(self, options: SearchOptions, *, url: str, study: str, folder: Path, say: Any) -> None:
        self.options, self.folder, self.say = options, folder, say
        self.token = me(f"{time.time_ns():x}")
        self.space = load_space(options.space)
        self.study = open_study(url, study, options)
        self.study.sampler = sampler_of(options, worker=self.token, structural=ChangesModel(self.space))
        self.study.pruner = pruner_of(options)
        self.predict = predictor(options)
        self.rejected = 0

    @property
    def trials(self) -> list[FrozenTrial]:
        """All entries of the study, by number."""
        return self.study.get_trials(deepcopy=False)

    def go(self) -> None:
        """Trials until there are enough."""
        self.say({"event": "worker", "worker": self.token})
        while True:
            fail_stale_trials(self.study)
            release_dead(self.study)
            trials = standing(self.trials)
            if sum(each.state in FINISHED for each in trials) >= self.options.wanted:
                return
            waiting = any(each.state == TrialState.WAITING for each in trials)
            ready = self.options.method != "pbt" or may_ask(trials, self.options.trials)
            if not ready or (len(trials) >= self.options.wanted and not waiting):
                time.sleep(ASK_AGAIN_S)
                continue
            self._turn(self.study.ask())

    def _turn(self, trial: optuna.Trial) -> None:
        earlier = [each for each in standing(self.trials) if each.number < trial.number]
        if len(earlier) >= self.options.wanted:  # Another worker was first.
            trial.set_user_attr(SURPLUS, True)
            self.study.tell(trial, state=TrialState.FAIL)
            return
        try:
            with self._heartbeat(trial):
                self._train(trial)
        except KeyboardInterrupt:
            self.study.tell(trial, state=TrialState.FAIL)
            queue_again(self.study, self.trials[trial.number])
            raise

    @contextlib.contextmanager
    def _heartbeat(self, trial: optuna.Trial) -> Iterator[None]:
        storage, over = self.study._storage, threading.Event()

        def beat() -> None:
            while True:
                with contextlib.suppress(Exception):  # A storage that is away for a moment; others judge by the grace.
                    storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
                if over.wait(HEARTBEAT_S):
                    return

        thread = threading.Thread(target=beat, name="shoal-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _train(self, trial: optuna.Trial) -> None:
        options, began = self.options, time.monotonic()
        frozen = self.trials[trial.number]
        folder = folder_of(self.folder, origin(frozen))
        if options.method == "darts" and not self._choose_modules(trial, folder):
            return
        job = job_of(self.space, DrawingTrial(trial))
        name = point(options.space, trial.params)
        trial.set_user_attr("job", name)
        costs: list[float] = []
        if self.predict is not None:
            costs = list(self.predict(job))
            trial.set_user_attr("predicted", {"step_s": costs[0], "memory_bytes": costs[1]})
            if options.memory_limit is not None and costs[1] > options.memory_limit:
                self._reject(trial)
                return
        self.rejected = 0
        self.say({"event": "begin", "trial": trial.number, "params": trial.params})
        try:
            value, run = self._run(trial, name, folder, place=slot(self.trials, frozen))
        except TrialDiverged as error:
            self._ended(trial, TrialState.PRUNED, str(error))
            return
        except TrialFailed as error:
            self._failed(trial, error)
            return
        trial.set_user_attr("step_s", run.step_s)
        trial.set_user_attr("memory_bytes", run.summary.get("memory_bytes"))
        trial.set_user_attr("seconds", time.monotonic() - began)
        if value is None:
            self._ended(trial, TrialState.PRUNED, None)
        else:
            self.study.tell(trial, [value, *costs])
            self.say({"event": "end", "trial": trial.number, "value": value})
        if options.method != "pbt" and not options.keep_checkpoints:
            drop_checkpoints(folder)
            drop_checkpoints(folder / FOLDER)

    def _choose_modules(self, trial: optuna.Trial, folder: Path) -> bool:
        """Learns which modules the model has; whether that went well."""
        self.say({"event": "begin", "trial": trial.number, "params": {}})
        try:
            shares = learn_modules(
                self.space, trial, self.options, folder, listen=self._listener(trial, self.options.steps)
            )
        except TrialDiverged as error:
            self._ended(trial, TrialState.PRUNED, f"the network of all candidates: {error}")
            return False
        except TrialFailed as error:
            self._failed(trial, error)
            return False
        trial.set_user_attr("shares", shares)
        placed = self.study.sampler
        assert isinstance(placed, PlacedSampler)
        assert isinstance(placed.inner, Chosen)
        placed.inner.modules = {name: max(each, key=each.__getitem__) for name, each in shares.items()}
        return True

    def _listener(self, trial: optuna.Trial, steps: int) -> Callable[[dict[str, Any]], None]:
        said = [0.0]

        def listen(message: dict[str, Any]) -> None:
            if message["event"] == "step" and time.monotonic() - said[0] > SAY_S:
                said[0] = time.monotonic()
                self.say({"event": "step", "trial": trial.number, "step": message["step"], "steps": steps})

        return listen

    def _failed(self, trial: optuna.Trial, error: TrialFailed) -> None:
        self._ended(trial, TrialState.FAIL, str(error))
        self._require_hope()

    def _run(self, trial: optuna.Trial, name: str, folder: Path, *, place: int) -> tuple[float | None, Any]:
        """(value, run); None of a trial that was ended early."""
        options = self.options
        ends = rungs(options)
        if options.method == "pbt":
            ends = [options.steps * (place // options.trials + 1) // options.rounds]
            parent = self.trials[trial.number].user_attrs.get(PARENT)
            if parent is not None:
                begin_with_copy(folder_of(self.folder, origin(self.trials[parent])), folder)
        value, run, listen = None, None, self._listener(trial, ends[-1])
        for end in ends:
            run = run_to(name, options, folder, steps=end, listen=listen)
            value = value_of(run, options)
            if options.cluster is None:
                trial.report(value, end)
                if end != ends[-1] and trial.should_prune():
                    return None, run
        return value, run

    def _ended(self, trial: optuna.Trial, state: TrialState, reason: str | None) -> None:
        if reason is not None:
            trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=state)
        self.say({"event": "end", "trial": trial.number, "value": None})

    def _reject(self, trial: optuna.Trial) -> None:
        self.rejected += 1
        trial.set_user_attr(REJECTED, True)
        self.study.tell(trial, state=TrialState.FAIL)
        self.say({"event": "rejected", "trial": trial.number})
        if self.rejected >= MOST_REJECTED:
            raise CannotSearch(
                f"{MOST_REJECTED} models in a row are predicted not to fit {self.options.memory_limit:.4g} bytes; "
                "raise --memory-limit, or make the space's models smaller"
            )

    def _require_hope(self) -> None:
        trials = standing(self.trials)
        failed = [each for each in trials if each.state == TrialState.FAIL]
        if len(failed) >= MOST_FAILED and not any(each.state == TrialState.COMPLETE for each in trials):
            raise CannotSearch(f"{len(failed)} trials failed and none succeeded: {failed[-1].user_attrs.get('reason')}")


def main() -> int:
    """The process."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a job prints.
    lock = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with lock, contextlib.suppress(BrokenPipeError):
            out.write(json.dumps(message) + "\n")
            out.flush()

    order = json.loads(sys.stdin.readline())
    sys.path[:0] = [each for each in order["sys_path"] if each not in sys.path]
    threading.Thread(target=_end_with_parent, name="shoal-parent", daemon=True).start()
    try:
        options = SearchOptions.from_json(order["options"])
        worker = Worker(options, url=order["url"], study=order["study"], folder=Path(order["folder"]), say=say)
        worker.go()
    except (KeyboardInterrupt, TrialStopped):
        return 130
    except ValueError as error:
        say({"event": "error", "text": str(error)})
        return 2
    return 0


def _end_with_parent() -> None:
    while sys.stdin.readline():
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
