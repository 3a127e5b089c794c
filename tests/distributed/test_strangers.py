"""Strangers on the network: they poison the store, alter links, hold ports; nothing of theirs is taken for a rank's."""

from __future__ import annotations

import contextlib
import os
import random
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
from shoal.comm.transport.handshake import Stranger, answer
from shoal.comm.transport.signed_store import SignedStore, StoreNotSigned, StoreTimeout
from shoal.comm.transport.token import TokenMissing, job_token, token_file

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


@pytest.mark.parametrize("here", [{"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "h", "WORLD_SIZE": "2",
                                                                  "LOCAL_WORLD_SIZE": "2"}])  # fmt: skip
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


@contextlib.contextmanager
def poisoning(port: int, *, again: bool) -> Iterator[list[str]]:  # noqa: F811
    """Overwrites every key of a store as it appears, once or all the time, and talks nonsense to its port."""
    done, poisoned, chance = threading.Event(), [], random.Random(0)

    def work() -> None:
        noise = []
        while not done.is_set():
            try:
                for _ in range(3):
                    noise.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    noise[-1].sendall(chance.randbytes(64))
                store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=5),
                                      wait_for_workers=False)  # fmt: skip
                while not done.wait(0.001):
                    for key in store.list_keys():
                        if again or key not in poisoned:
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


def test_a_store_that_is_poisoned_all_the_time_ends_a_job_in_a_sentence(ranks: Ranks, port: int) -> None:  # noqa: F811
    with poisoning(port, again=True) as poisoned:
        found = by_variables(ranks, port, {"RANK": 0}, {"RANK": 1}, meet_s=[3] * 2)
    assert poisoned
    for each in found:
        assert (
            each.get("sum") == 3.0
            or "is not signed with this job's token" in each["error"]
            or ("lost the meeting place" in each["error"] or "did not come" in each["error"])
        )


# Links


@pytest.mark.parametrize("how", ["flip", "repeat", "drop", "reorder", "cut", "insert"])
def test_a_relay_between_two_ranks_alters_nothing(ranks: Ranks, how: str) -> None:
    first, second = ranks(f"{TARGETS}:through_a_relay", {"how": how}, ranks=2)
    assert first["altered"] > 0
    assert {tuple(each) for each in first["sums"] + second["sums"]} <= {(2.0, 2.0)}
    assert first["told"] or second["told"]
    if how in ("flip", "repeat", "reorder", "insert"):
        assert first["told"].startswith("LinkAltered: the connection to rank 1 was altered on its way: block ")
    else:
        assert first["told"].startswith(("PeerLost", "TimedOut", "CannotConnect"))


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


def test_a_caller_who_says_nothing_is_waited_for_by_nobody_else() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    steps = answer(one, b"secret", rank=0)
    assert next(steps) == selectors.EVENT_READ
    assert len(other.recv(64)) == 16
    other.sendall(bytes(60))
    with pytest.raises(Stranger, match="does not hold this job's token"):
        next(steps)
