"""Two hosts on one machine: network namespaces joined by a veth pair, in each of which torchrun starts ranks.

What goes from one to the other passes the pair, whose byte counters are the kernel's own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

PORT = "29511"
"""Of the meeting place; it is free, as the namespaces are new."""


def why_not() -> str | None:
    """Why this machine cannot play two hosts; None if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    probe = f"shoal-probe-{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One namespace, and the end of the pair that lies in it."""

    name: str
    interface: str
    address: str


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes both, and removes them whatever happens."""
    mark = secrets.token_hex(3)
    hosts = tuple(
        Host(name=f"shoal-{mark}-{n}", interface=f"sh{mark}{n}", address=f"10.251.7.{n + 1}") for n in range(2)
    )
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        first, second = hosts
        _ip("link", "add", first.interface, "netns", first.name, "type", "veth",
            "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for host in hosts:
            _ip("-netns", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-netns", host.name, "link", "set", host.interface, "up")
            _ip("-netns", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)


def torchrun(
    hosts: Sequence[Host], words: Sequence[str], *, ranks_a_host: int, environment: dict[str, str], timeout_s: float
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `torchrun ... -m words` on all hosts at once, to their ends."""
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", host.name, sys.executable, "-m", "torch.distributed.run",
             "--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks_a_host), "--node-rank", str(number),
             "--master-addr", hosts[0].address, "--master-port", PORT, "-m", *words],
            env={**environment, "GLOO_SOCKET_IFNAME": host.interface},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number, host in enumerate(hosts)
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=timeout_s) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks.
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=10)
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *end)
        for process, end in zip(started, ends, strict=True)
    ]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
