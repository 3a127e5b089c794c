"""A counting process group: wraps any backend and enters every collective into the Book.

PyTorch silently calls a method that a Python process group lacks on the backend below; so every method is either in
COUNTED (it communicates) or in PASSIVE (it does not), and a test checks that none is missing.

Over Gloo two collectives are also replaced, based on a measurement (benchmarks/comm.py --backend gloo): Gloo's
reduce-scatter runs a full all-reduce and then copies, twice the bytes of an all-to-all and a sum; its all-gather is
slower than plain sends of large parts. Every user of the group, DDP and fully_shard included, gets the faster ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from shoal.comm.backend import create as create_shoal
from shoal.comm.counted import CountedGroup
from shoal.comm.wire import even_payload

BACKENDS = {"shoal": "shoal", "gloo": "shoal-gloo", "nccl": "shoal-nccl"}
"""The name under which each backend is registered; backends of others are wrapped in a counting group."""


def registered(name: str) -> str:
    """The name under which a backend is registered, including backends of accelerators not listed above."""
    return BACKENDS.get(name, f"shoal-{name}")


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(t) for t in tensors)


def _first(args: tuple[Any, ...], ranks: int) -> int:
    return _bytes(args[0])


def _second(args: tuple[Any, ...], ranks: int) -> int:
    return _bytes(args[1])


def _largest(args: tuple[Any, ...], ranks: int) -> int:
    # gather and scatter: only the root holds the full vector; other ranks derive its size from their part.
    return max(
        _bytes(args[0]),
        _bytes(args[1]),
        ranks * min(_bytes(args[0]) or _bytes(args[1]), _bytes(args[1]) or _bytes(args[0])),
    )


def _no_payload(args: tuple[Any, ...], ranks: int) -> int:
    return 0


Payload = Callable[[tuple[Any, ...], int], int]
COUNTED: dict[str, tuple[str, Payload]] = {
    "allreduce": ("all_reduce", _first),
    "allreduce_coalesced": ("all_reduce", _first),
    "reduce_scatter": ("reduce_scatter", _second),
    "reduce_scatter_single": ("reduce_scatter", _second),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _second),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _second),
    "_reduce_scatter_base": ("reduce_scatter", _second),
    "allgather": ("all_gather", _first),
    "allgather_coalesced": ("all_gather", _first),
    "allgather_into_tensor_coalesced": ("all_gather", _first),
    "all_gather_single": ("all_gather", _first),
    "all_gather_single_coalesced": ("all_gather", _first),
    "_allgather_base": ("all_gather", _first),
    "alltoall": ("all_to_all", _second),
    "alltoall_base": ("all_to_all", _second),
    "all_to_all_single": ("all_to_all", _second),
    "broadcast": ("broadcast", _first),
    "reduce": ("reduce", _first),
    "gather": ("gather", _largest),
    "scatter": ("scatter", _largest),
    "send": ("send", _first),
    "recv": ("recv", _first),
    "recv_anysource": ("recv", _first),
    "barrier": ("barrier", _no_payload),
    "monitored_barrier": ("barrier", _no_payload),
}

PASSIVE = (
    "BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL _backend_id _device_types _enable_collectives_timing "
    "_end_coalescing _get_backend _get_backend_name _get_sequence_number_for_group _has_hooks _id "
    "_pybind11_conduit_v1_ _register_backend _register_on_completion_hook _set_default_backend _set_group_desc "
    "_set_group_name _set_sequence_number_for_group _start_coalescing _wait_for_pending_works abort "
    "bound_device_id boxed get_group_store group_desc group_name name rank set_timeout shutdown size unbox "
    "use_pg_for_symm_mem_rendezvous"
).split()
"""None of these moves data between ranks (calls inside a coalescing bracket are counted one by one)."""


class CountingGroup(CountedGroup):
    """Enters each collective into the Book, then forwards it to the inner group."""

    def __init__(self, inner: dist.ProcessGroup, backend: Any, device: torch.device, name: str) -> None:
        super().__init__(inner.rank(), inner.size(), name)
        self.inner = inner
        self.register(backend, device)

    def getBackendName(self) -> str:
        return f"counting {self.inner.name()}"

    def abort(self) -> None:
        self.inner.abort()

    def shutdown(self) -> None:
        self.inner.shutdown()


def _in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Keyword arguments appended to the positional ones in order: outputs before inputs."""
    named = {name: value for name, value in kwargs.items() if not name.endswith("_sizes")}
    outputs = [value for name, value in named.items() if name.startswith(("output", "tensor"))]
    inputs = [value for name, value in named.items() if name.startswith("input")]
    return (*args, *outputs, *inputs)


def _counted(method: str, kind: str, payload: Payload) -> Callable[..., Any]:
    def call(self: CountingGroup, *args: Any, **kwargs: Any) -> Any:
        self._enter(kind, payload(_in_order(args, kwargs), self.size()))
        return getattr(self.inner, method)(*args, **kwargs)

    call.__name__ = method
    return call


def _counted_by_parts(method: str) -> Callable[..., Any]:
    """An all-to-all: its parts may be uneven, and this rank's own part is not sent."""

    def call(self: CountingGroup, *args: Any, **kwargs: Any) -> Any:
        _, given, *splits = _in_order(args, kwargs)
        rows = kwargs.get("input_split_sizes") or (splits[1] if len(splits) > 1 else None)
        payload = _bytes(given)
        if rows or not isinstance(given, torch.Tensor):
            kept = payload * rows[self.rank()] // max(sum(rows), 1) if rows else _bytes(given[self.rank()])
            payload = even_payload(bytes_to_others=payload - kept, ranks=self.size())
        self._enter("all_to_all", payload)
        return getattr(self.inner, method)(*args, **kwargs)

    call.__name__ = method
    return call


for _method, (_kind, _payload) in COUNTED.items():
    _by_parts = _kind == "all_to_all"
    setattr(CountingGroup, _method, _counted_by_parts(_method) if _by_parts else _counted(_method, _kind, _payload))


class _Finish(Work):  # type: ignore[misc]
    """Several operations in flight, and a computation to run when all are complete."""

    def __init__(
        self, works: Sequence[Any], then: Callable[[], None], result: list[torch.Tensor], *, polls: bool
    ) -> None:
        """`polls`: whether `is_completed` of the operations is reliable. For Gloo's sends and receives it is not."""
        super().__init__()
        self._works = works
        self._polls = polls
        self._then: Callable[[], None] | None = then
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._then is not None:
            for work in self._works:
                work.wait(timeout) if timeout else work.wait()
            then, self._then = self._then, None
            then()
        return True

    def is_completed(self) -> bool:
        # The computation after the operations may still be due: only a completed one may return True, eventually.
        if self._then is not None and self._polls and not all(work.is_completed() for work in self._works):
            return False
        return self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._result

    def get_future(self) -> Future:
        self.wait()
        future: Future = Future()
        future.set_result(self._result)
        return future


PLAIN_SENDS_BYTES = 2 << 20
"""Size from which plain sends gather faster than Gloo's all-gather; below it, waiting for them costs milliseconds."""


class GlooGroup(CountingGroup):
    """Gloo with its two slow collectives replaced by ones built on its faster operations."""

    _gather_tag = 0

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **_: Any) -> Any:
        """Each rank sends every other rank its part; parts are summed in rank order, so the result is deterministic."""
        self._enter("reduce_scatter", _bytes(input))
        reduce = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        # The order of the operands matters: swapped, they never compare equal, and `in` does not find them.
        average = reduce == dist.ReduceOp.AVG
        replaced = reduce == dist.ReduceOp.SUM or (average and input.is_floating_point())
        if self.size() == 1 or not replaced or input.numel() == 0:
            options = (opts,) if opts is not None else ()
            return self.inner.reduce_scatter_single(output, input, *options)
        arrived = torch.empty(input.numel(), dtype=input.dtype, device=input.device)
        work = self.inner.all_to_all_single(arrived, input.contiguous().view(-1), [], [])

        def add() -> None:
            parts = arrived.view(self.size(), *output.shape)
            if self.size() == 2:
                torch.add(parts[0], parts[1], out=output) if output.is_contiguous() else output.copy_(parts.sum(0))
            else:
                output.copy_(parts.sum(0))
            if average:
                output.div_(self.size())

        return _Finish([work], add, [output], polls=True)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, **_: Any) -> Any:
        """Each rank sends its part to every other rank, directly into the output."""
        self._enter("all_gather", _bytes(output))
        ranks, me = self.size(), self.rank()
        options = (opts,) if opts is not None else ()
        if not output.is_contiguous():
            return self.inner.all_gather_single(output, input, *options)
        if ranks == 1 or _bytes(output) < PLAIN_SENDS_BYTES:
            # Flattened: Gloo requires equal shapes, which the call does not.
            return self.inner.all_gather_single(output.view(-1), input.contiguous().view(-1), *options)
        parts = output.view(ranks, -1)
        mine = input.contiguous()
        # A tag of its own separates gathers in flight from each other and from other messages.
        self._gather_tag = (self._gather_tag + 1) % (1 << 20)
        tag = (1 << 24) + self._gather_tag
        works = [self.inner.recv([parts[(me - d) % ranks]], (me - d) % ranks, tag) for d in range(1, ranks)]
        works += [self.inner.send([mine], (me + d) % ranks, tag) for d in range(1, ranks)]
        if parts[me].data_ptr() != mine.data_ptr():
            parts[me].view(mine.shape).copy_(mine)
        return _Finish(works, lambda: None, [output], polls=False)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(output, input, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)


def _create_gloo(options: Any, _: Any) -> CountingGroup:
    backend = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    backend._set_sequence_number_for_group()
    return _around(backend, dist.ProcessGroup.BackendType.GLOO, torch.device("cpu"), options, GlooGroup)


def accelerator_backend() -> tuple[str, torch.device] | None:
    """The backend for tensors on this machine's accelerator, and the device; None without an accelerator, or if PyTorch
    has no collectives for it. Does not initialise the device: a process may still fork afterwards."""
    device = torch.accelerator.current_accelerator()
    name = None if device is None else dist.Backend.default_device_backend_map.get(device.type)
    if device is None or name in (None, dist.Backend.GLOO, "fake"):
        return None
    return name, device


def _create_on_accelerator(options: Any, extra: Any) -> CountingGroup:
    """A counting group around the accelerator's own backend: built into PyTorch, or a plug-in."""
    found = accelerator_backend()
    assert found is not None
    name, kind = found
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    built_in = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}.get(name)
    if built_in is not None:
        cls = getattr(dist, built_in)
        settings = cls.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        made = cls(options.store, options.group_rank, options.group_size, settings)
        made._set_sequence_number_for_group()
    else:
        plugin = dist.Backend._plugins[name.upper()]
        plain = (options.store, options.group_rank, options.group_size, options.timeout)
        made = plugin.creator_fn(options, extra) if plugin.extended_api else plugin.creator_fn(*plain)
    if isinstance(made, dist.ProcessGroup):
        group = CountingGroup(made, made._get_backend(kind), kind, options.group_id)
    else:
        type_ = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
        group = _around(made, type_, kind, options, CountingGroup)
    if dist.is_initialized():
        # Gives barriers their device. Not for the world's group: torch would assume that later groups are split from
        # its communicator, which is not so for a plug-in, and ranks outside those groups would wait.
        group.bound_device_id = device
    return group


def _around(backend: Any, kind: Any, device: torch.device, options: Any, cls: type[CountingGroup]) -> CountingGroup:
    inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    inner._set_group_name(options.group_id)
    inner._register_backend(device, kind, backend)
    inner._set_default_backend(kind)
    return cls(inner, backend, device, options.group_id)


def register_backends() -> None:
    """Registers the counting backends with torch.distributed; can be called repeatedly."""
    if BACKENDS["gloo"].upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKENDS["gloo"], _create_gloo, extended_api=True, devices=["cpu"])
        dist.Backend.register_backend(BACKENDS["shoal"], create_shoal, extended_api=True, devices=["cpu"])
    found = accelerator_backend()
    if found is not None and registered(found[0]).upper() not in dist.Backend._plugins:
        name, kind = found
        dist.Backend.register_backend(registered(name), _create_on_accelerator, extended_api=True, devices=[kind.type])
