"""The study of a search: Optuna's storage, what stands in it, and trials that were lost and are queued again.

Storages keep JSON and numbers; nothing is unpickled from them. A worker's trial has a heartbeat: when it ends, because
the worker or its host did, the next worker that asks queues the trial again, with its values and what it had reported.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from shoal.searching.options import CannotSearch, SearchOptions

if TYPE_CHECKING:
    from optuna.study import Study

FILE = "study.sqlite"
HEARTBEAT_S = 5
GRACE_S = 30
"""Without a heartbeat, after which a trial is lost."""
OPTIONS, WORKER, REJECTED, SURPLUS = "options", "worker", "rejected", "surplus"
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)

warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed", category=UserWarning)
optuna.logging.set_verbosity(optuna.logging.ERROR)


def local_storage(folder: Path) -> str:
    """The storage of a search on one machine."""
    return f"sqlite:///{(folder / FILE).absolute()}"


def open_storage(url: str) -> RDBStorage:
    """The storage at a URL of SQLAlchemy."""
    more: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        more = {"connect_args": {"timeout": 60}}
    try:
        return RDBStorage(
            url,
            engine_kwargs=more,
            heartbeat_interval=HEARTBEAT_S,
            grace_period=GRACE_S,
            heartbeat_stale_trial_callback=queue_again,
        )
    except ImportError as error:
        raise CannotSearch(f"--storage {scheme(url)}: {error}; install the driver of this database") from None
    except Exception as error:
        if not type(error).__module__.startswith(("sqlalchemy", "alembic", "optuna", "psycopg", "pg8000")):
            raise
        text = str(error).splitlines()[0]
        raise CannotSearch(
            f"--storage {scheme(url)}: {type(error).__name__}: {text}; give a URL of SQLAlchemy, such as "
            "postgresql+psycopg://user@host/database"
        ) from None


def scheme(url: str) -> str:
    """A URL without what may be secret."""
    return url.partition("://")[0] + "://..."


def open_study(url: str, name: str, options: SearchOptions) -> Study:
    """The study of this name, made if there is none.

    Raises:
        CannotSearch: There is one, of another search.
    """
    down = StudyDirection.MINIMIZE
    first = StudyDirection.MAXIMIZE if options.better == "higher" else down
    storage = open_storage(url)
    try:
        study = optuna.create_study(
            storage=storage, study_name=name, directions=[first, down, down] if options.cluster else [first]
        )
        study.set_user_attr(OPTIONS, options.to_json())
        return study
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name)
    before = study.user_attrs.get(OPTIONS)
    if before is None:
        raise CannotSearch(f"the study {name!r} was not made by shoal search; give another --folder or --study")
    differing = SearchOptions.from_json(before).differences(options)
    if differing:
        own = ", ".join(f"{each} {before[each]!r}" for each in differing)
        raise CannotSearch(f"the search in this place has {own}; repeat the same options, or give another --folder")
    if before["trials"] < options.trials:
        study.set_user_attr(OPTIONS, options.to_json())
    return study


def me(token: str) -> str:
    """How this process signs its trials."""
    return f"{socket.gethostname()}:{os.getpid()}:{token}"


_queue_again = RetryHeartbeatStaleTrialCallback(inherit_intermediate_values=True)


def queue_again(study: Study, trial: FrozenTrial) -> None:
    """Puts a lost trial back: the next to ask gets it, values and all."""
    _queue_again(study, trial)


def release(study: Study, of: Callable[[FrozenTrial], bool]) -> int:
    """Queues running trials again whose worker has ended; how many."""
    found = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if of(trial):
            try:
                study.tell(trial.number, state=TrialState.FAIL)
            except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
                continue  # Another has done it.
            queue_again(study, study.get_trials(deepcopy=False)[trial.number])
            found += 1
    return found


def release_dead(study: Study) -> int:
    """Queues trials of this host's processes again that are no more. Trials of other hosts have a heartbeat."""
    host = socket.gethostname()

    def dead(trial: FrozenTrial) -> bool:
        where, _, rest = trial.user_attrs.get(WORKER, "").partition(":")
        return where == host and not Path(f"/proc/{rest.partition(':')[0]}").exists()

    return release(study, dead)


def origin(trial: FrozenTrial) -> int:
    """The number that a trial had before it was first lost."""
    return int(trial.system_attrs.get("failed_trial", trial.number))


def slot(trials: Sequence[FrozenTrial], trial: FrozenTrial) -> int:
    """A trial's place in the search: its number, as if none before had been lost. What is drawn for it depends on this
    alone, so a search that was stopped draws as one that was not."""
    number = origin(trial)
    return number - sum(1 for each in trials if each.number < number and origin(each) != each.number)


def standing(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that count: not those that were queued again, rejected before they began, or one too many."""
    found = list(trials)
    lost = {number for each in found for number in each.system_attrs.get("retry_history", ())}
    return [
        each
        for each in found
        if each.number not in lost and REJECTED not in each.user_attrs and SURPLUS not in each.user_attrs
    ]
