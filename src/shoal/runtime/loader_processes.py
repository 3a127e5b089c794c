"""Processes that read batches for one rank, for data whose Python code holds the interpreter or that waits a lot.

They are forks of the rank, so any data object serves them, and they hold its memory in common until they write to it. A
request is the indices of a batch; the answer is a block of anonymous shared memory that is mapped, not copied, and
that no crash can leave behind. Nothing is pickled. A loader ends with its rank, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from shoal.job.errors import JobError

Batch = dict[str, Tensor]
HEAD = struct.Struct("<Q")
ALIGNED = 64
PR_SET_PDEATHSIG = 1
END_S = 2.0
"""For a loader to finish what it reads, before it is killed."""
TYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class LoaderProcesses:
    """Data whose batches are read by processes: `batch` may be called by as many threads as there are processes."""

    def __init__(self, data: Any, *, processes: int) -> None:
        self.data = data
        self._loaders: list[Loader] = []
        self._idle: queue.SimpleQueue[Loader] = queue.SimpleQueue()
        for number in range(processes):
            self._loaders.append(Loader(data, number))
            self._idle.put(self._loaders[-1])

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray) -> Batch:
        """Read by the first process that is free."""
        loader = self._idle.get()
        try:
            return loader.read(indices)
        finally:
            self._idle.put(loader)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [each.pid for each in self._loaders]

    def close(self) -> None:
        """Ends them all."""
        for each in self._loaders:
            each.hang_up()
        until = time.monotonic() + END_S
        for each in self._loaders:
            each.end(until)


class Loader:
    """One process, and this end of the connection to it."""

    def __init__(self, data: Any, number: int) -> None:
        self.number = number
        self.connection, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run(data, theirs, parent)
        theirs.close()
        self._status: int | None = None

    def read(self, indices: np.ndarray) -> Batch:
        """One batch.

        Raises:
            JobError: Reading it failed, or the process is gone.
        """
        wanted = np.ascontiguousarray(indices, dtype=np.int64).tobytes()
        try:
            self.connection.sendall(HEAD.pack(len(wanted)) + wanted)
            head, descriptors = _receive_with_file(self.connection)
            answer = json.loads(_receive(self.connection, head))
        except OSError:
            raise JobError(f"{self._gone()} while it read samples {indices[:8].tolist()}") from None
        if "error" in answer:
            raise JobError(f"a loader process could not read samples {indices[:8].tolist()}: {answer['error']}")
        return _mapped(answer["entries"], descriptors[0])

    def _gone(self) -> str:
        with contextlib.suppress(ChildProcessError):
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        status = self._status or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else "ended"
        return f"loader process {self.number} ({self.pid}) {how}"

    def hang_up(self) -> None:
        """Lets it end after what it reads."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def end(self, until: float) -> None:
        """Waits for its end, and kills it when that takes longer than `until`."""
        if self._status is not None:
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.005)


def _run(data: Any, connection: socket.socket, parent: int) -> NoReturn:
    """The process: answers until its rank hangs up."""
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the rank decides.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _leave_connections(connection.fileno())
        torch.set_num_threads(1)
        with contextlib.suppress(EOFError, ConnectionError, BrokenPipeError):
            while True:
                [size] = HEAD.unpack(_receive(connection, HEAD.size))
                _answer(connection, data, np.frombuffer(_receive(connection, size), dtype=np.int64).copy())
        status = 0
    except BaseException:  # Nothing of the rank's may run in this fork: not its handlers, not its exit.
        traceback.print_exc()
    os._exit(status)


def _leave_connections(own: int) -> None:
    """Closes what the rank talks by: its peers would not notice its end while another process holds the connection."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if number > 2 and number != own and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                os.close(number)


def _answer(connection: socket.socket, data: Any, indices: np.ndarray) -> None:
    try:
        entries, block = _packed(data.batch(indices))
    except Exception as error:  # The rank raises it.
        text = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        body = json.dumps({"error": text}).encode()
        connection.sendall(HEAD.pack(len(body)) + body)
        return
    body = json.dumps({"entries": entries}).encode()
    try:
        socket.send_fds(connection, [HEAD.pack(len(body))], [block])
        connection.sendall(body)
    finally:
        os.close(block)


def _packed(batch: Batch) -> tuple[list[dict[str, Any]], int]:
    """Where each entry lies, and the block of memory that holds them."""
    entries: list[dict[str, Any]] = []
    tensors: list[Tensor] = []
    end = 0
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
            raise JobError(f"entry {name} is a {type(value).__name__}; loader processes pass dense tensors on the CPU")
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        entries.append(
            {"name": name, "type": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "begin": end}
        )
        tensors.append(flat)
        end += -(-flat.numel() // ALIGNED) * ALIGNED
    block = os.memfd_create("shoal-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(block, max(1, end))
        with mmap.mmap(block, max(1, end)) as memory:
            for entry, flat in zip(entries, tensors, strict=True):
                if flat.numel():
                    np.frombuffer(memory, np.uint8, flat.numel(), entry["begin"])[:] = flat.numpy()
    except BaseException:
        os.close(block)
        raise
    return entries, block


def _mapped(entries: list[dict[str, Any]], block: int) -> Batch:
    """The tensors in a block, which stays as long as they do."""
    try:
        memory = mmap.mmap(block, os.fstat(block).st_size)
    finally:
        os.close(block)
    found = {}
    for entry in entries:
        kind, shape = TYPES[entry["type"]], tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            found[entry["name"]] = torch.empty(shape, dtype=kind)
        else:
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=entry["begin"])
            found[entry["name"]] = flat.reshape(shape)
    return found


def _receive_with_file(connection: socket.socket) -> tuple[int, list[int]]:
    """The size of an answer, and the file that came with it."""
    content, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 1)
    if not content:
        raise ConnectionError("the loader is gone")
    content += _receive(connection, HEAD.size - len(content))
    return HEAD.unpack(content)[0], list(descriptors)


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(1 << 20, size - len(content)))
        if not part:
            raise ConnectionError("the other end is gone")
        content += part
    return bytes(content)
