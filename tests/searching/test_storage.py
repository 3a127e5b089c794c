"""Studies in databases: lost trials of other hosts by their heartbeat, several machines at one study."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy
from optuna.storages import fail_stale_trials
from optuna.trial import TrialState

from shoal.searching.options import CannotSearch, SearchOptions
from shoal.searching.sampling import sampler_of
from shoal.searching.study import GRACE_S, local_storage, open_study, release_dead, standing

SPACE = str(Path(__file__).with_name("line_space.py"))
OPTIONS = SearchOptions(space="none", method="random", trials=4, steps=4)


def lose(url: str, name: str) -> None:
    """A worker of another host begins a trial and is never heard of again; another's heart still beats."""
    study = open_study(url, name, OPTIONS)
    for worker in ("elsewhere:1:lost", "elsewhere:2:alive"):
        study.sampler = sampler_of(OPTIONS, worker=worker)
        trial = study.ask()
        trial.suggest_float("x", 0.0, 1.0)
        study._storage.record_heartbeat(trial._trial_id)
    release_dead(study)
    fail_stale_trials(study)
    assert [each.state for each in study.trials] == [TrialState.RUNNING] * 2
    before = datetime.timedelta(seconds=2 * GRACE_S)
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        lost = study.trials[0]._trial_id
        beats = sqlalchemy.Table("trial_heartbeats", sqlalchemy.MetaData(), autoload_with=engine)
        at = connection.execute(sqlalchemy.select(beats.c.heartbeat).where(beats.c.trial_id == lost)).scalar_one()
        connection.execute(beats.update().where(beats.c.trial_id == lost).values(heartbeat=at - before))
    engine.dispose()
    fail_stale_trials(study)
    states = [each.state for each in study.trials]
    assert states == [TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]
    assert [each.number for each in standing(study.trials)] == [1, 2]
    assert study.trials[2].params == study.trials[0].params


def test_a_trial_without_a_heartbeat_is_queued_again(tmp_path):
    lose(local_storage(tmp_path), "study")


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_trial_without_a_heartbeat_is_queued_again_by_postgresql(postgresql):
    lose(postgresql, "heartbeats")


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_two_machines_share_a_study_in_postgresql(postgresql, tmp_path):
    """As two hosts do: commands of their own, with folders of their own."""
    command = [
        sys.executable,
        "-m",
        "shoal",
        "search",
        SPACE,
        "-m",
        "random",
        "--trials",
        "6",
        "-n",
        "1",
        "-s",
        "serial",
        "--steps",
        "4",
        "--storage",
        postgresql,
        "--study",
        "shared",
        "--json",
    ]
    places = [tmp_path / "one", tmp_path / "two"]
    running = [
        subprocess.Popen([*command, "--folder", str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    found = []
    for each in running:
        out, err = each.communicate(timeout=240)
        assert each.returncode == 0, err
        found.append(json.loads(out))
    assert [row["state"] for row in found[0]["trials"]] == ["finished"] * 6
    assert found[0]["trials"] == found[1]["trials"]
    trained = [sorted(path.name for path in (place / "trials").iterdir()) for place in places]
    assert sorted(trained[0] + trained[1]) == [f"{number:04d}" for number in range(6)]


def test_a_database_that_does_not_answer_is_named_without_its_password():
    with pytest.raises(CannotSearch) as error:
        open_study("postgresql+psycopg://me:secret@127.0.0.1:1/none", "s", OPTIONS)
    assert "secret" not in str(error.value)
    assert "postgresql+psycopg://..." in str(error.value)
