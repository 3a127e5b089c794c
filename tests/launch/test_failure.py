"""Which failure is the cause: no process is started."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.launch.failure import (
    Failure,
    RankFailed,
    RankHung,
    first_cause,
    from_exception,
    from_exit,
    from_hang,
)


def told(message: str, *, at_s: float = 1.0, network: bool = False, for_user: bool = False) -> dict[str, Any]:
    flags = {"for_user": for_user, "network": network}
    return {"type": "a.b.Broken", "message": message, "traceback": "", "at_s": at_s, **flags}


def test_the_earliest_failure_is_the_cause() -> None:
    failures = [from_exception(rank, told("x", at_s=10.0 - rank)) for rank in range(3)]
    assert first_cause(failures) == failures[2]
    assert first_cause([]) is None


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "gloo/transport/tcp/pair.cc: Read error [127.0.0.1]: Connection reset by peer",
        "gloo/transport/tcp/unbound_buffer.cc Timed out waiting 1800000ms for recv operation",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Broken pipe",
    ],
)
def test_a_lost_connection_is_the_echo_of_whatever_else_failed(text: str) -> None:
    echo = from_exception(0, told(text, at_s=1.0, network=True))
    cause = from_exit(1, -9, at_s=2.0)
    assert echo.is_echo
    assert first_cause([echo, cause]) == cause
    assert first_cause([echo]) == echo


def test_a_users_own_network_error_is_no_echo() -> None:
    assert not from_exception(0, told("database: connection refused", network=False)).is_echo


def test_a_message_is_one_line_and_never_empty() -> None:
    assert from_exception(3, told("one\ntwo")).error.message == "rank 3 failed: Broken: one"
    assert from_exception(3, told("")).error.message == "rank 3 failed: Broken"
    assert from_exception(3, told("one\ntwo", for_user=True)).error.message == "one\ntwo"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL"),
        (-63, "killed by signal 63"),
        (3, "exit status 3"),
        (None, "lost"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(code: int | None, words: str) -> None:
    failure = from_exit(2, code, 0.0)
    assert words in failure.error.message
    assert failure.error.rank == 2


def test_a_hang_is_the_late_ranks_failure_not_its_finders() -> None:
    failure: Failure = from_hang(0, {"late": [2, 3], "message": "rank 2 is late"}, 1.0)
    assert isinstance(failure.error, RankHung)
    assert isinstance(failure.error, RankFailed)
    assert failure.error.rank == 2
    assert from_hang(0, {"late": [], "message": "nobody"}, 1.0).error.rank == 0
