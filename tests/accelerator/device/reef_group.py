"""A process group for the rehearsal device that follows NCCL's rules; Gloo carries the bytes through host views.

Refused, as by NCCL: tensors on another device, not contiguous or of types it lacks; bitwise reductions; receives from
any source. Messages between two ranks are matched in the order of their calls and ignore tags, and each is carried
when both ranks have reached it (REEF_P2P=eager: a send does not wait for its receive).
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

TYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
DATA_TAG, TURN_TAG = 7, 8
LIMIT_S = 20.0
"""A message that waits longer than this (or than REEF_P2P_LIMIT_S) is a deadlock."""
MOST_BUFFERED = 1000


def view(given: Any) -> Any:
    """Tensors of the device as tensors that Gloo can read and write."""
    if isinstance(given, (list, tuple)):
        return [view(each) for each in given]
    if not isinstance(given, torch.Tensor):
        return given
    if given.device.type != "reef":
        raise RuntimeError(f"No backend type associated with device type {given.device.type}")
    if not given.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if given.dtype not in TYPES:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {given.dtype}")
    return torch.reef.host_view(given)


class MessageWork(Work):
    """A message in flight."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.done, self.what = threading.Event(), what
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = float(os.environ.get("REEF_P2P_LIMIT_S", LIMIT_S))
        if not self.done.wait(limit_s):
            raise RuntimeError(f"deadlock by NCCL's rules: {self.what} was not matched in {limit_s:g} s")
        if self.error:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future:
        self.wait()
        future: Future = Future()
        future.set_result([])
        return future


class Pair:
    """The messages between this rank and another: one stream, one message after the other."""

    def __init__(self, carrier: Any, peer: int) -> None:
        self.carrier, self.peer = carrier, peer
        self.queue: queue.SimpleQueue[tuple[str, torch.Tensor, MessageWork]] = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        token = torch.zeros(1)
        buffered: deque[Any] = deque(maxlen=MOST_BUFFERED)
        eager = os.environ.get("REEF_P2P", "rendezvous") == "eager"
        while True:
            kind, tensor, work = self.queue.get()
            try:
                if eager and kind == "send":
                    copy = tensor.clone()
                    buffered.append((copy, self.carrier.send([copy], self.peer, DATA_TAG)))
                elif eager:
                    self.carrier.recv([tensor], self.peer, DATA_TAG).wait()
                elif kind == "send":
                    self.carrier.recv([token], self.peer, TURN_TAG).wait()
                    self.carrier.send([tensor], self.peer, DATA_TAG).wait()
                else:
                    self.carrier.send([token], self.peer, TURN_TAG).wait()
                    self.carrier.recv([tensor], self.peer, DATA_TAG).wait()
            except BaseException as error:
                work.error = error
            work.done.set()

    def add(self, kind: str, tensor: torch.Tensor) -> MessageWork:
        work = MessageWork(f"{kind} of {tuple(tensor.shape)} {tensor.dtype} with rank {self.peer} of the group")
        self.queue.put((kind, tensor, work))
        return work


class ReefGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.carrier = dist.ProcessGroup(store, rank, size)
        self.carrier._set_group_name(name)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.carrier._register_backend(torch.device("cpu"), kind, self.gloo)
        self.carrier._set_default_backend(kind)
        self._register_backend(torch.device("reef"), dist.ProcessGroup.BackendType.CUSTOM, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self.pairs: dict[int, Pair] = {}

    def getBackendName(self) -> str:
        return "reefccl"

    name = getBackendName

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        return self._with(to).add("send", view(tensors)[0])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        return self._with(source).add("recv", view(tensors)[0])

    def _with(self, peer: int) -> Pair:
        if peer not in self.pairs:
            self.pairs[peer] = Pair(self.carrier, peer)
        return self.pairs[peer]

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier()

    def recv_anysource(self, *_: Any) -> Any:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")

    def monitored_barrier(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("ProcessGroupNCCL does not support monitoredBarrier, only GLOO supports monitored barrier.")

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass


def _plain(method: str) -> Any:
    def call(self: ReefGroup, *args: Any, **kwargs: Any) -> Any:
        reduce = next((a.reduceOp for a in args if hasattr(a, "reduceOp")), None)
        if reduce is not None and any(reduce == other for other in BITWISE):
            raise RuntimeError("Cannot use ReduceOp.BAND/BOR/BXOR with NCCL")
        if reduce is not None and reduce == dist.ReduceOp.AVG:
            raise NotImplementedError("NCCL averages, but Gloo, which carries the bytes here, does not")
        return getattr(self.carrier, method)(*view(args), **{name: view(value) for name, value in kwargs.items()})

    return call


def _flat(method: str) -> Any:
    """NCCL compares sizes; Gloo compares shapes too."""

    def call(self: ReefGroup, output: torch.Tensor, input: torch.Tensor, *rest: Any) -> Any:
        return getattr(self.carrier, method)(view(output).view(-1), view(input).view(-1), *rest)

    return call


FLAT = ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base")
PLAIN = (
    "allreduce allreduce_coalesced broadcast reduce allgather reduce_scatter all_to_all_single alltoall_base alltoall "
    "gather scatter allgather_coalesced all_gather_single_coalesced reduce_scatter_single_coalesced "
    "allgather_into_tensor_coalesced reduce_scatter_tensor_coalesced"
).split()
for _method in (*FLAT, *PLAIN):
    if hasattr(dist.ProcessGroup, _method):
        setattr(ReefGroup, _method, (_flat if _method in FLAT else _plain)(_method))


def create(options: Any, _: Any) -> ReefGroup:
    return ReefGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


def register() -> None:
    if "REEFCCL" not in dist.Backend._plugins:
        dist.Backend.register_backend("reefccl", create, extended_api=True, devices=["reef"])
