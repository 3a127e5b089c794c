"""Reading the memory of another process of this host: a large message is copied once, by its reader.

The kernel permits it among processes of one user unless configured otherwise (Yama's ptrace_scope, a container's
seccomp profile); so it is tried on a known number first, and done without where that fails.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import Any

import numpy as np

from shoal.comm.transport.link import Bytes

MOST_AT_ONCE = 1 << 30
"""Bytes in one call; the kernel cuts what is larger than twice this."""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _system_call() -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        pieces = ctypes.POINTER(_Piece)
        call.argtypes = (ctypes.c_int, pieces, ctypes.c_ulong, pieces, ctypes.c_ulong, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return call


_read = _system_call()


class PeerMemory:
    """The memory of the process at the other end of a socket."""

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self._process = struct.unpack("3i", credentials)[0]
        """Its number as this process sees it; 0 if it does not."""

    def fetch(self, address: int, into: Bytes) -> None:
        """Copies what lies at its address. Raises OSError."""
        if _read is None or not self._process:
            raise PermissionError("this system does not let a process read another's memory")
        for start in range(0, len(into), MOST_AT_ONCE):
            part = into[start : start + MOST_AT_ONCE]
            here, there = _Piece(part.ctypes.data, len(part)), _Piece(address + start, len(part))
            if _read(self._process, here, 1, there, 1, 0) != len(part):
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))

    def shows(self, address: int, value: int) -> bool:
        """Whether this word can be read there: the right process, and permitted."""
        word = np.zeros(8, dtype=np.uint8)
        try:
            self.fetch(address, word)
        except OSError:
            return False
        return int.from_bytes(word.tobytes(), "little") == value
