"""Strangers on the network: they poison the store, alter links, hold ports; nothing of theirs is taken for a rank's."""

from __future__ import annotations

import contextlib
import os
import random
import re
import selectors
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed.test_join import by_variables, port  # noqa: F401  (a fixture)
from shoal.comm.transport.handshake import Stranger, answer, call
from shoal.comm.transport.signed_store import SignedStore, StoreNotSigned, StoreTimeout
from shoal.comm.transport.token import TokenMissing, derive, job_token, token_file

Ranks = Callable[..., list[Any]]
TARGETS = "distributed.stranger_targets"


# The token


ELSEWHERE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "1"}
REFUSED = (
    "SHOAL_TOKEN is not set, and MASTER_ADDR is '10.1.2.3': without a token any process that reaches that address "
    "could join as a rank. Set SHOAL_TOKEN to the same secret on every host, for example the output of "
    "`openssl rand -hex 16`."
)


def test_between_hosts_a_token_is_required() -> None:
    with pytest.raises(TokenMissing) as told:
        job_token(ELSEWHERE)
    assert str(told.value) == REFUSED
    assert job_token({**ELSEWHERE, "SHOAL_TOKEN": "one"}) == b"one"


def test_a_job_between_hosts_ends_before_it_says_anything_without_a_token(ranks: Ranks, port: int) -> None:  # noqa: F811
    outside = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": socket.gethostname(), "SHOAL_TOKEN": ""}
    found = by_variables(ranks, port, outside, meet_s=[5])
    assert found[0]["error"].startswith("SHOAL_TOKEN is not set, and MASTER_ADDR is")


@pytest.mark.parametrize(
    "here", [{"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "h", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}]
)
def test_on_one_host_ranks_share_a_file_that_no_other_user_reads(here: dict[str, str], tmp_path: Path) -> None:
    environment = {**here, "XDG_CACHE_HOME": str(tmp_path)}
    tokens = {job_token(environment) for _ in range(3)}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 64
    assert stat.S_IMODE(token_file(environment).stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "shoal") == ["token"]


@pytest.mark.parametrize("how", ["readable", "link", "pipe", "short"])
def test_a_token_file_that_others_could_read_or_replace_is_refused(how: str, tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    job_token(environment)
    path = token_file(environment)
    if how == "readable":
        path.chmod(0o644)
    elif how == "short":
        path.write_text("1234")
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if how == "link" else os.mkfifo(path)
    with pytest.raises(TokenMissing, match=r"Remove it, or set SHOAL_TOKEN"):
        job_token(environment)


def test_ranks_without_a_token_meet_on_one_host(ranks: Ranks, port: int) -> None:  # noqa: F811
    none = {"SHOAL_TOKEN": ""}
    found = by_variables(ranks, port, {"RANK": 1, **none}, {"RANK": 0, **none}, meet_s=[20, 20])
    assert [each["sum"] for each in found] == [3.0, 3.0]


# The store


def test_a_value_counts_under_its_own_key_session_and_token_only() -> None:
    store = dist.HashStore()
    mine = SignedStore(store, b"token", "job")
    mine.set("a", "right")
    assert mine.get("a", 1) == "right"
    store.set("b", store.get("a"))
    assert mine.look("b") is None
    assert SignedStore(store, b"other", "job").look("a") is None
    assert SignedStore(store, b"token", "another job").look("a") is None
    assert mine.session("1").look("a") is None
    with pytest.raises(StoreNotSigned, match="the store's value of 'b' is not signed with this job's token"):
        mine.get("b", 0.05)
    with pytest.raises(StoreTimeout):
        mine.get("c", 0.05)
    store.set("a", "wrong")
    mine.look_after()
    assert mine.get("a", 1) == "right"
    store.set("d", b"\xff\x00")
    assert mine.claim("d", "first")
    assert not SignedStore(store, b"token", "job").claim("d", "second")


class Deleting:
    """A store in which a stranger deletes every key as soon as it was asked for, or written."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.inner, self.at_once = dist.HashStore(), at_once
        self.inner.set_timeout(timedelta(seconds=2))

    def set(self, key: str, value: Any) -> None:
        if not self.at_once:
            self.inner.set(key, value)

    def check(self, keys: list[str]) -> bool:
        found = bool(self.inner.check(keys))
        self.inner.delete_key(keys[0])
        return found

    def get(self, key: str) -> Any:
        return self.inner.get(key)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        return self.inner.compare_set(key, expected, value)


def test_a_key_that_is_deleted_between_a_look_and_a_read_holds_nobody_up() -> None:
    mine = SignedStore(Deleting(), b"token", "job")
    mine.set("a", "right")
    assert mine.get("a", 1) == "right"


def test_a_rank_whose_values_are_deleted_again_and_again_ends_long_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.comm.transport.signed_store.DISTURBED_S", 0.1)
    mine = SignedStore(Deleting(at_once=True), b"token", "job")
    mine.set("a", "right")
    with pytest.raises(StoreNotSigned) as told:
        mine.get("b", 60)
    assert re.fullmatch(
        r"values of this rank in the store were deleted or replaced \d+ times while it waited for 'b': another process "
        r"writes into the store at MASTER_ADDR\. Start the job again on a port and a network that strangers cannot "
        r"reach\.",
        str(told.value),
    )


@contextlib.contextmanager
def poisoning(port: int, *, again: bool, delete: bool = False) -> Iterator[list[str]]:  # noqa: F811
    """Overwrites (or deletes) every key of a store as it appears, once or all the time, and talks nonsense to its
    port."""
    done, poisoned, chance = threading.Event(), [], random.Random(0)

    def work() -> None:
        noise = []
        while not done.is_set():
            try:
                for _ in range(3):
                    noise.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    noise[-1].sendall(chance.randbytes(64))
                store = dist.TCPStore(
                    "127.0.0.1", port, None, False, timeout=timedelta(seconds=5), wait_for_workers=False
                )
                while not done.wait(0.001):
                    for key in store.list_keys():
                        if delete:
                            store.delete_key(key)
                            poisoned.append(key)
                        elif again or key not in poisoned:
                            store.set(key, chance.choice(["poison", "{}", "", "1", '{"refused": "go away"}']))
                            poisoned.append(key)
            except (RuntimeError, OSError):
                done.wait(0.01)
        for each in noise:
            each.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield poisoned
    finally:
        done.set()
        thread.join()


def test_a_store_in_which_every_key_is_overwritten_once_does_not_stop_a_job(ranks: Ranks, port: int) -> None:  # noqa: F811
    with poisoning(port, again=False) as poisoned:
        found = by_variables(ranks, port, {"RANK": 0}, {"RANK": 1}, {"RANK": 2}, meet_s=[20] * 3)
    assert [each.get("sum") for each in found] == [6.0] * 3, found
    assert len(poisoned) > 5


@pytest.mark.parametrize("delete", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_store_that_is_poisoned_all_the_time_ends_a_job_in_a_sentence(ranks: Ranks, port: int, delete: bool) -> None:  # noqa: F811
    with poisoning(port, again=True, delete=delete) as poisoned:
        found = by_variables(ranks, port, {"RANK": 0}, {"RANK": 1}, meet_s=[3] * 2)
    assert poisoned
    for each in found:
        assert (
            each.get("sum") == 3.0
            or "is not signed with this job's token" in each["error"]
            or "were deleted or replaced" in each["error"]
            or "after all ranks had joined" in each["error"]
            or "did not publish its address in time" in each["error"]
            or ("lost the rendezvous" in each["error"] or "did not connect" in each["error"])
        )


ODD = {
    "blank": " ",
    "long": "x" * 100_000,
    "letters of many scripts": "schön-Ω-☃",
    "lines": "one\ntwo\n",
    "no text": os.fsdecode(bytes([0xFF, 0xFE, 0x80])),
    "words": "a token; $(true) 'quoted' \\",
}


@pytest.mark.parametrize("name", sorted(ODD))
def test_ranks_with_an_odd_token_meet(ranks: Ranks, port: int, name: str) -> None:  # noqa: F811
    token = {"SHOAL_TOKEN": ODD[name]}
    found = by_variables(ranks, port, {"RANK": 0, **token}, {"RANK": 1, **token}, meet_s=[20, 20])
    assert [each["sum"] for each in found] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("one", "one\n"),
        pytest.param("one", " one", marks=pytest.mark.slow),
        pytest.param("x" * 100_000, "x" * 99_999, marks=pytest.mark.slow),
        ("é", "e\u0301"),
        pytest.param(" ", "", marks=pytest.mark.slow),
    ],
)
def test_tokens_that_look_alike_are_different_tokens(ranks: Ranks, port: int, mine: str, theirs: str) -> None:  # noqa: F811
    found = by_variables(
        ranks, port, {"RANK": 0, "SHOAL_TOKEN": mine}, {"RANK": 1, "SHOAL_TOKEN": theirs}, meet_s=[2, 1]
    )
    assert found[0]["error"].startswith("rank 1 of 2 did not connect within 2 s.")
    assert found[1]["error"].startswith("rank 0 of 2 did not connect within 1 s.")


# Links


HOW = ["flip", "repeat", "drop", "reorder", "cut", "truncate", "reset", "insert"]
LATE = ("truncate", "reset")
"""Found by a time-out, as is a drop."""
THERE = [pytest.param(how, False, marks=pytest.mark.slow if how in LATE else []) for how in HOW]
BACK = [pytest.param(how, True, marks=[] if how == "flip" else pytest.mark.slow) for how in HOW]


@pytest.mark.parametrize(("how", "back"), [*THERE, *BACK])
def test_a_relay_between_two_ranks_alters_nothing(ranks: Ranks, how: str, back: bool) -> None:
    """`back`: what the called rank sends is altered, and the calling one must find it."""
    first, second = ranks(f"{TARGETS}:through_a_relay", {"how": how, "back": back}, ranks=2)
    assert first["altered"] > 0
    assert {tuple(each) for each in first["sums"] + second["sums"]} <= {(2.0, 2.0)}
    assert first["told"] or second["told"]
    reader, other = (second, 0) if back else (first, 1)
    if how in ("flip", "repeat", "reorder", "insert"):
        assert reader["told"].startswith(f"LinkAltered: the connection to rank {other} was altered on its way: block ")
    else:
        assert reader["told"].startswith(("PeerLost", "TimedOut", "CannotConnect"))


def test_a_relay_that_only_listens_disturbs_nothing(ranks: Ranks) -> None:
    for each in ranks(f"{TARGETS}:through_a_relay", {"how": "nothing"}, ranks=2):
        assert each["sums"] == [[2.0, 2.0]] * 3, each


def test_without_authentication_the_same_relay_does_alter_numbers(ranks: Ranks) -> None:
    """What the tests above would see if links were not protected."""
    off = {"SHOAL_LINK_AUTH": "off"}
    first, _ = ranks(f"{TARGETS}:through_a_relay", {"how": "flip"}, ranks=2, environment=off)
    assert first["told"] == ""
    assert [2.0, 2.0] not in first["sums"]


@pytest.mark.parametrize("carrier", ["tcp", "auto"])
def test_strangers_who_hold_connections_do_not_hold_up_a_group(ranks: Ranks, carrier: str) -> None:
    for each in ranks(f"{TARGETS}:among_strangers", {"carrier": carrier, "count": 150}, ranks=3, timeout_s=50):
        assert each["sum"] == 6.0
        assert each["strangers"] == 150
        assert each["took_s"] < 20


@pytest.mark.parametrize("how", ["replay", "reflect", "half"])
def test_greetings_of_another_time_hold_up_nothing_and_are_not_answered(ranks: Ranks, how: str) -> None:
    first, second = ranks(f"{TARGETS}:replayed", {"how": how, "count": 100}, ranks=2, timeout_s=50)
    assert first["sums"] == second["sums"] == [3.0, 3.0]
    assert first["strangers"] == 100
    assert max(first["took_s"], second["took_s"]) < 20
    # A challenge is all that they were told, if they were given as much.
    assert set(first["answers"]) <= {0, 16}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_process_of_another_user_is_a_stranger_on_the_same_host() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0shoal-test-{os.getpid()}")
    listener.listen()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(listener.getsockname())
        caller.recv(1)
        os._exit(0)
    connection, _ = listener.accept()
    with pytest.raises(Stranger, match="a process of another user"):
        next(answer(connection, b"secret", rank=0))
    connection.close()
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("replay", "does not hold this job's token"),
        ("other job", "does not hold this job's token"),
        ("byte by byte", None),
    ],
)
def test_a_handshake_counts_for_one_connection_of_one_session_only(what: str, reason: str | None) -> None:
    secret, other = derive(b"token", "links", "g", "session 1"), derive(b"token", "links", "g", "session 2")

    def greet(said: bytes | None, key: bytes) -> tuple[bytes, Any]:
        """What a caller says to a listener (or what was said before, once more), and what the listener makes of it."""
        listener, caller = socket.socketpair()
        listener.setblocking(False)
        caller.setblocking(False)
        answering, calling = answer(listener, secret, rank=0), call(caller, key, rank=1, other=0, channel=0)
        next(answering)
        next(calling) if said is None else caller.recv(16)
        if said is None:
            said = listener.recv(64, socket.MSG_PEEK)
        elif what == "byte by byte":
            raise AssertionError
        else:
            caller.sendall(said)
        try:
            next(answering)
        except StopIteration as done:
            return said, done.value
        raise AssertionError("the listener waits")

    said, known = greet(None, secret)
    assert (known.rank, len(said)) == (1, 60)
    if what == "byte by byte":
        listener, caller = socket.socketpair()
        listener.setblocking(False)
        answering = answer(listener, secret, rank=0)
        assert [next(answering) for _ in range(3)] == [selectors.EVENT_READ] * 3
        for byte in said[:59]:
            caller.sendall(bytes([byte]))
            assert next(answering) == selectors.EVENT_READ
        return
    with pytest.raises(Stranger, match=reason):
        greet(said if what == "replay" else None, other if what == "other job" else secret)


def test_a_caller_who_says_nothing_is_waited_for_by_nobody_else() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    steps = answer(one, b"secret", rank=0)
    assert next(steps) == selectors.EVENT_READ
    assert len(other.recv(64)) == 16
    other.sendall(bytes(60))
    with pytest.raises(Stranger, match="does not hold this job's token"):
        next(steps)
