"""A PostgreSQL server of the tests' own, where Debian's is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

USER = "postgres"


def _programs() -> Path | None:
    found = shutil.which("initdb")
    places = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((place for place in reversed(places) if (place / "initdb").exists()), None)


def _stop(server: int) -> None:
    """By a signal: the fixture may end after a test that starts no process."""
    os.kill(server, signal.SIGQUIT)
    until = time.monotonic() + 20
    while Path(f"/proc/{server}").exists() and time.monotonic() < until:
        time.sleep(0.02)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of an empty database, reached by a socket in a folder of its own."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    as_user: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))  # Short: a socket's path has at most 107 letters.
    if os.getuid() == 0:  # The server refuses to run as root.
        try:
            owner = pwd.getpwnam(USER)
        except KeyError:
            pytest.skip(f"PostgreSQL does not run as root, and there is no user {USER}")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        as_user = ["runuser", "-u", USER, "--"]
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        command = [*as_user, str(programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
        assert done.returncode == 0, done.stderr

    try:
        run("initdb", "-D", str(data), "-U", USER, "-A", "trust", "--no-sync")
        settings = f"-k {folder} -c listen_addresses= -c fsync=off -c dynamic_shared_memory_type=posix"
        run("pg_ctl", "-D", str(data), "-o", settings, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg://{USER}@/{USER}?host={folder}"
        finally:
            _stop(int((data / "postmaster.pid").read_text().split()[0]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
