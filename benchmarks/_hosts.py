"""Two hosts on one machine: network namespaces joined by a veth pair, in each of which torchrun starts ranks.

What goes from one to the other passes the pair, whose byte counters are the kernel's own, and which the kernel holds
to a rate if one is given. Benchmarks and tests (`benchmarks._hosts`) share it.
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
BURST_S, QUEUE_S = 0.5e-3, 0.4
"""What a limited wire may carry at once after a pause, as the time that takes; how long a packet may queue for it."""


def why_not(*, limited: bool = False) -> str | None:
    """Why this machine cannot play two hosts (with a `limited` rate between them); None if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for command in ("ip", "tc")[: 1 + limited]:
        if shutil.which(command) is None:
            return f"needs the command {command} (iproute2)"
    probe = f"shoal-probe-{secrets.token_hex(3)}"
    try:
        _run("ip", "netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    try:
        if limited:
            _limit(Host(name=probe, interface="lo", address="127.0.0.1"), 1e8)
    except subprocess.CalledProcessError as error:
        return f"the kernel cannot limit a rate here: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "delete", probe)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One namespace, and the end of the pair that lies in it."""

    name: str
    interface: str
    address: str


@contextmanager
def two_hosts(*, bits_per_s: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Makes both, and removes them whatever happens. `bits_per_s` limits each direction, headers included."""
    mark = secrets.token_hex(3)
    hosts = tuple(
        Host(name=f"shoal-{mark}-{n}", interface=f"sh{mark}{n}", address=f"10.251.7.{n + 1}") for n in range(2)
    )
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
        first, second = hosts
        _run(
            "ip",
            "link",
            "add",
            first.interface,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            "name",
            second.interface,
            "netns",
            second.name,
        )
        for host in hosts:
            _run("ip", "-netns", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _run("ip", "-netns", host.name, "link", "set", host.interface, "up")
            _run("ip", "-netns", host.name, "link", "set", "lo", "up")
            if bits_per_s is not None:
                _limit(host, bits_per_s)
        yield first, second
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", host.name)


def torchrun(
    hosts: Sequence[Host],
    words: Sequence[str],
    *,
    ranks_a_host: int,
    environment: dict[str, str],
    timeout_s: float,
    errors: int | None = subprocess.PIPE,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `torchrun ... -m words` on all hosts at once, to their ends. `errors=None` shows at once what they say."""
    token = secrets.token_hex(16)
    started = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                host.name,
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                str(len(hosts)),
                "--nproc-per-node",
                str(ranks_a_host),
                "--node-rank",
                str(number),
                "--master-addr",
                hosts[0].address,
                "--master-port",
                PORT,
                "-m",
                *words,
            ],
            env={"SHOAL_TOKEN": token, **environment, "GLOO_SOCKET_IFNAME": host.interface},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for number, host in enumerate(hosts)
    ]
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


def _limit(host: Host, bits_per_s: float) -> None:
    """Holds what leaves a host to a rate. The burst is small beside what is measured, yet some full frames."""
    _run("tc", "-netns", host.name, "qdisc", "replace", "dev", host.interface, "root", *limit_words(bits_per_s))


def limit_words(bits_per_s: float) -> list[str]:
    """What tc is told."""
    burst_bytes = max(16_000, int(bits_per_s / 8 * BURST_S))
    return ["tbf", "rate", f"{int(bits_per_s)}bit", "burst", f"{burst_bytes}b", "latency", f"{QUEUE_S}s"]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
