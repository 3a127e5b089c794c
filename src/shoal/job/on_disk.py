"""Builds a model whose large tensors lie in files, so that no rank holds all of it in memory before it is cut.

The model's own code runs as ever, on real tensors in host memory that are mapped from unlinked temporary files: every
value is the one that a plain build gives, to the bit, whatever `__init__`, `reset_parameters` or a library draws, ties
or registers. The mode below moves the result of each operation that made a large tensor to such a file, and every few
megabytes takes the files' pages out of this process (they stay on the disk, and in the host's cache while it has room).
What the engine lays out afterwards it copies into memory, range by range; a mapped tensor ends with its last use.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST = 1 << 20
"""Bytes from which a tensor is moved to a file."""
RESIDENT = 32 << 20
"""Bytes of files that operations may touch before their pages leave this process."""

READ = 4 << 20
"""Bytes that a checkpoint may read of them before that."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

_mapped: dict[int, weakref.ref[mmap.mmap]] = {}
"""Address -> the mapping there."""
_read_bytes = 0
_private: set[int] = set()
"""Addresses of ranges of a user's file."""
_changed: set[int] = set()
"""Those of them that were written to: their pages are this process's own and stay."""


def folder_for_tensors() -> Path:
    """Where the files are: TMPDIR where it is set, otherwise a folder that is no memory on common systems."""
    given = os.environ.get("TMPDIR")
    usual = Path("/var/tmp")
    return usual if not given and os.access(usual, os.W_OK) else Path(tempfile.gettempdir())


class BuiltOnDisk(TorchDispatchMode):
    """While it is entered, large host tensors that operations make lie in files. `why` says where that failed."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""
        self._touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            given = {_address(x) for x in tree_leaves((args, kwargs)) if _large(x)} if _large(result) else set()
            if func._schema.is_mutable and _mapped:
                _changed.update(given & _mapped.keys())
            if _large(result):
                self._touched += result.untyped_storage().nbytes()
                if _address(result) not in given and _address(result) not in _mapped and not self.why:
                    result = self._try_move(result, copied=not str(func).startswith("aten.empty"))
        if self._touched > RESIDENT:
            self._touched = 0
            leave_pages()
        return result

    def _try_move(self, tensor: Tensor, *, copied: bool) -> Tensor:
        try:
            return moved(tensor, copied=copied)
        except OSError as error:
            self.why = f"{folder_for_tensors()}: {os.strerror(error.errno or 0)}"
            return tensor


def moved(tensor: Tensor, *, copied: bool = True) -> Tensor:
    """The tensor in a file, with its values if they are `copied`; a small one stays where it is."""
    if not _large(tensor):
        return tensor
    bytes_there = _file(tensor.untyped_storage().nbytes())
    there = bytes_there.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return there.copy_(tensor) if copied else there


def _large(x: Any) -> bool:
    plain = isinstance(x, Tensor) and type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"
    return plain and x.layout == torch.strided and x.untyped_storage().nbytes() >= LEAST


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _file(nbytes: int) -> Tensor:
    """A byte tensor in an unlinked file, which ends with the tensor."""
    folder = str(folder_for_tensors())
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        file, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
    try:
        os.posix_fallocate(file, 0, nbytes)  # A full disk is found here, not by a signal at a write.
        held = mmap.mmap(file, nbytes)
    finally:
        os.close(file)
    return registered(held, 0, nbytes)


def lying_in(path: str, start: int, nbytes: int) -> Tensor:
    """A byte tensor that is a range of a file of the user's. It is read where it is used, page by page. Writes stay in
    this process."""
    begin = start - start % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        held = mmap.mmap(file.fileno(), start + nbytes - begin, flags=mmap.MAP_PRIVATE, offset=begin)
    return registered(held, start - begin, nbytes, private=True)


def registered(held: mmap.mmap, offset: int, nbytes: int, *, private: bool = False) -> Tensor:
    """A byte tensor in a mapping, whose pages leave with those of all others."""
    tensor = torch.frombuffer(held, dtype=torch.uint8, offset=offset, count=nbytes)
    address = _address(tensor)

    def ended(_: object) -> None:
        _mapped.pop(address, None)
        _private.discard(address)
        _changed.discard(address)

    _mapped[address] = weakref.ref(held, ended)
    if private:
        _private.add(address)
    return tensor


def leave_pages() -> None:
    """Takes the pages of all mapped tensors out of this process; the next read brings them back from the file. Memory
    that was freed goes back too: glibc would keep the holes that aligned tensors leave, and not fill them again."""
    for address, known in list(_mapped.items()):
        held = known()
        if held is not None and not (address in _private and address in _changed):
            held.madvise(mmap.MADV_DONTNEED)
    if _mapped and _trim is not None:
        _trim(0)


def has_read(tensor: Tensor) -> None:
    """After all of a tensor was read, for a checkpoint: every few megabytes, pages leave again."""
    global _read_bytes
    if is_on_disk(tensor):
        _read_bytes += tensor.numel() * tensor.element_size()
        if _read_bytes > READ:
            _read_bytes = 0
            leave_pages()


def is_on_disk(tensor: Tensor) -> bool:
    """Whether a tensor lies in such a file."""
    return (
        bool(_mapped)
        and tensor.device.type == "cpu"
        and type(tensor) in (Tensor, nn.Parameter)
        and (_address(tensor) in _mapped)
    )


def built_on_disk(build: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """A model with its large tensors in files, and why some are not (empty where all are)."""
    with BuiltOnDisk() as mode:
        model = build()
    leave_pages()
    return model, mode.why


@contextmanager
def leaving_pages() -> Iterator[None]:
    """While a model on the disk computes: the pages of a module leave this process when it has."""

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if any(is_on_disk(param) for param in module._parameters.values() if param is not None):
            leave_pages()

    hook = register_module_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()
        leave_pages()


def to_memory(model: nn.Module) -> None:
    """Copies what still lies in files into memory."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if is_on_disk(tensor):
                tensor.data = tensor.data.clone()
    leave_pages()
