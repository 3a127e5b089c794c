"""The life of one rank: take the order, call the target, hand back its result, leave.

The fork server calls `main` in the process it has just forked. Whatever happens to the target, the parent
gets a report before the process exits.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import numpy  # noqa: F401  (loaded here so that ranks are forked with it)
import torch
import torch._dynamo  # An optimiser loads it at its first step, in more than a second.

import shoal.parallel.apply  # noqa: F401
from shoal.comm.transport.link import PeerLost
from shoal.common.log import logger
from shoal.launch.channel import Channel, Line
from shoal.launch.join import leave
from shoal.launch.lateness import Verdict
from shoal.launch.start import Target
from shoal.launch.watch import Watch

PR_SET_PDEATHSIG = 1


def main(link: socket.socket, server: int) -> None:
    """Runs one order. Does not return into the server's code: the process ends here."""
    _die_with(server)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to every process; the parent decides.
    line = Line(link)
    status = 1
    try:
        reader = link.makefile("rb")
        order = json.loads(reader.readline() or "null")
        if order is not None:
            channel = Channel(rank=order["rank"], world=order["world"], line=line)
            channel.stop_on(signal.SIGTERM)
            logger.addHandler(_ToParent(channel))
            line.write("ready", None)
            status = _work(order, channel, line, reader)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        line.flush()
        # Gloo's threads may abort the interpreter's own way out; nothing is left to do on it.
        os._exit(status)


class _ToParent(logging.Handler):
    """Passes what a rank warns of on to the process that started it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.say({"event": "warning", "text": record.getMessage()})


def _work(order: dict[str, Any], channel: Channel, line: Line, reader: Any) -> int:
    def report(verdict: Verdict) -> None:
        line.write("hung", {"late": verdict.late, "message": verdict.message, "stack": verdict.stack})
        line.flush(5.0)
        os._exit(1)

    watch = Watch(hang_after_s=order["hang_after_s"], report=report).start()
    try:
        _settle(order)
        result = find(order["target"])(order["arguments"], channel)
        line.write("result", result)
        watch.done()
        # No rank leaves before all have their result: the last collective may still be on its way to a peer.
        reader.readline()
    except BaseException as error:
        line.write("failed", describe(error))
        return 1
    watch.stop()
    leave()
    return 0


def find(target: str) -> Target:
    """The function that "package.module:function" names."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"target {target!r}: expected 'package.module:function'")
    found: Target = getattr(importlib.import_module(module), name)
    return found


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON, with all that the parent needs to distinguish it from its echo on other ranks."""
    kind = type(error)
    ours = isinstance(error, ValueError) and kind.__module__.partition(".")[0] == "shoal"
    return {
        "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "for_user": bool(getattr(error, "for_user", ours)),
        "network": isinstance(error, torch.distributed.DistError | PeerLost) or "gloo/transport" in str(error),
        "at_s": time.monotonic(),
    }


def _settle(order: dict[str, Any]) -> None:
    """Makes this fork of the server resemble a process that the parent had started itself."""
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:] = order["sys_path"]
    sys.argv[:] = order["argv"]
    importlib.invalidate_caches()
    os.chdir(order["directory"])
    torch.set_num_threads(order["threads"])


def _die_with(server: int) -> None:
    """Asks the kernel to kill this rank when the server dies, where the kernel can be asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
