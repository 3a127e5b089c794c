"""A rank's hold on the folder of its run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from shoal.comm.json_exchange import exchange
from shoal.training.check import TrainingStopped
from shoal.training.record import lock
from shoal.training.record.lock import FolderBusy, FolderLock


def held_folder(folder: Path, token: str | None, rank: int, channel: Any) -> FolderLock:
    """This rank's hold on the folder, of the run that holds it by `token`. Where the ranks have no parent process,
    rank 0 takes it for them. All ranks call it alike."""
    if token is not None:
        return lock.join(folder, token)
    mine, wrong = None, ""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        try:
            mine = lock.take(folder, say=lambda text: channel.say({"event": "note", "text": text}))
        except FolderBusy as error:
            wrong = str(error)
    first = exchange({"token": mine.token if mine is not None else "", "wrong": wrong, "host": socket.gethostname()})
    if first[0]["wrong"]:
        raise TrainingStopped(first[0]["wrong"])
    if mine is not None:
        return mine
    try:
        return lock.join(folder, first[0]["token"])
    except FolderBusy:
        if first[rank]["host"] == first[0]["host"]:
            raise
        return FolderLock(None, first[0]["token"])  # On this host it is another folder.
