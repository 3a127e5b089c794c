"""Values that ranks leave for each other in the job's store, signed with the job's token.

torch's store serves whoever reaches its port, so a stranger may write or delete any key. A value counts only if it is
signed for its own key in this session; any other is ignored, and the rank that wrote the right one writes it again
while it waits. A value that stays wrong until the time is up is named. Reads never wait in the store itself: a key that
is deleted between a look and a read would hold a rank up for the store's own time limit.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from shoal.comm.transport.token import derive

LOOK_S = 0.05
"""How often, at least, a rank that waits looks for values, and after those of its own."""
DISTURBED_S = 20.0
"""How long a rank waits while its own values are changed again and again, before the job ends."""
DISTURBED_TIMES = 10
_SIGNATURE = 64
_ABSENT = secrets.token_hex(16)
"""What no key holds: a compare_set that expects it changes nothing, and gives it back where there is no such key."""


class StoreNotSigned(ValueError):
    """The store holds a value that no rank of this job has written."""


class StoreTimeout(TimeoutError):
    """Keys that no rank has written in time."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"the store has no value of {', '.join(keys)}")
        self.keys = keys


class SignedStore:
    """A store of torch.distributed as the holders of one key see it. While it lives its values are looked after."""

    looked_after = True

    def __init__(self, store: Any, key: bytes, *scope: str) -> None:
        """`scope` names what the values belong to (a job, a group): values of another scope do not count."""
        self.store = store
        self._key = derive(key, "store", *scope)
        self._own: dict[str, bytes] = {}

    def session(self, fresh: str) -> SignedStore:
        """The same store for one session: values of an earlier one do not count. All ranks pass the same `fresh`."""
        other = SignedStore.__new__(SignedStore)
        other.store, other._key, other._own = self.store, derive(self._key, "session", fresh), {}
        return other

    def clone(self) -> SignedStore:
        """With a connection of its own, for another thread."""
        other = SignedStore.__new__(SignedStore)
        other.store, other._key, other._own, other.looked_after = self.store.clone(), self._key, {}, False
        return other

    def set(self, key: str, value: str) -> None:
        self._remember(key, self._sign(key, value))
        self.store.set(key, self._own[key])

    def _remember(self, key: str, value: bytes) -> None:
        self._own[key] = value
        if self.looked_after:
            _WRITTEN.add(self)

    def claim(self, key: str, value: str) -> bool:
        """Sets a key that no other rank has set; whether this one is the first."""
        mine = self._sign(key, value)
        expected = ""
        for _ in range(100):
            found = bytes(self.store.compare_set(key, expected, mine.decode("ascii")))
            if found == mine:
                self._remember(key, mine)
                return True
            if self._open(key, found) is not None:
                return False
            try:
                expected = found.decode("ascii")
            except UnicodeDecodeError:
                self.store.set(key, "")  # compare_set takes text only.
                expected = ""
        raise StoreNotSigned(_not_signed(key))

    def look(self, key: str) -> str | None:
        """The value of a key, if it is there and signed. Does not wait."""
        found = self._raw(key)
        return None if found is None else self._open(key, found)

    def _raw(self, key: str) -> bytes | None:
        found = bytes(self.store.compare_set(key, _ABSENT, _ABSENT))
        return None if found == _ABSENT.encode() else found

    def get(self, key: str, seconds: float) -> str:
        """Waits for a value. Raises StoreTimeout, or StoreNotSigned if all it found was not signed."""
        return self.get_all([key], seconds)[key]

    def get_all(self, keys: Iterable[str], seconds: float) -> dict[str, str]:
        """The values of several keys, once all are there. Meanwhile this rank's values are looked after; if they are
        changed again and again, the wait ends early."""
        wanted, found = list(keys), dict[str, str]()
        start_s, pause_s, repaired = time.monotonic(), 0.001, 0
        end_s = start_s + seconds
        while True:
            for key in wanted:
                if key not in found and (value := self.look(key)) is not None:
                    found[key] = value
            missing = [key for key in wanted if key not in found]
            if not missing:
                return {key: found[key] for key in wanted}
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                forged = [key for key in missing if self._raw(key) is not None]
                raise StoreNotSigned(_not_signed(forged[0])) if forged else StoreTimeout(missing)
            repaired += look_after_all()
            if repaired >= DISTURBED_TIMES and time.monotonic() - start_s > DISTURBED_S:
                raise StoreNotSigned(_disturbed(repaired, missing[0]))
            # Not by the store's own wait: it prints a warning each time that nothing came.
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LOOK_S)

    def look_after(self) -> int:
        """Writes the values of this rank again where they were replaced or deleted; how many were."""
        changed = [key for key, value in self._own.items() if self._raw(key) != value]
        for key in changed:
            self.store.set(key, self._own[key])
        return len(changed)

    def _sign(self, key: str, value: str) -> bytes:
        data = value.encode("ascii")
        return hmac.digest(self._key, key.encode() + b"\0" + data, "sha256").hex().encode() + data

    def _open(self, key: str, signed: bytes) -> str | None:
        given, data = signed[:_SIGNATURE], signed[_SIGNATURE:]
        right = hmac.digest(self._key, key.encode() + b"\0" + data, "sha256").hex().encode()
        return data.decode("ascii") if hmac.compare_digest(given, right) else None


_WRITTEN: WeakSet[SignedStore] = WeakSet()
"""Where this process has values of its own."""


def look_after_all() -> int:
    """For a rank that waits: others may need what it wrote before, to get where it is. How many values it repaired."""
    return sum(store.look_after() for store in list(_WRITTEN))


def _not_signed(key: str) -> str:
    return (
        f"the store's value of {key!r} is not signed with this job's token: another process writes into the store at "
        f"MASTER_ADDR. {_WAY_OUT}"
    )


def _disturbed(times: int, key: str) -> str:
    return (
        f"values of this rank in the store were deleted or replaced {times} times while it waited for {key!r}: another "
        f"process writes into the store at MASTER_ADDR. {_WAY_OUT}"
    )


_WAY_OUT = "Start the job again on a port and a network that strangers cannot reach."
