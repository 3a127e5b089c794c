"""The ranks of benchmarks/crossover.py: what the prediction is made from, and steps at the bandwidths around it.

The link is set anew before every turn: an emulated one reads its speed from an object that all links share, a real one
is limited by the kernel. So all bandwidths and all compressions take turns within one run, and what else the
machine does meets all of them alike.

    torchrun ... -m peers.crossover SETTINGS.json      (or `ranks_do` on ranks that were started otherwise)
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _hosts import limit_words

from peers.pilot import measure_computing, measure_ends, slower, with_background
from peers.slow_link import ByShoal
from shoal.calibration.codecs import measure_codecs
from shoal.comm.emulate import Emulation
from shoal.comm.group import BACKENDS
from shoal.comm.transport import emulated
from shoal.estimate.crossover import FRAMED, Codec, Setting
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.strategy import parse

LATENCY_S = 50e-6
FREE = 1e12
"""Bytes a second that no link here reaches."""
AROUND = (0.5, 0.75, 1.3, 2.0)
"""Bandwidths to step at, as parts of the predicted one."""
QUIET = 0.08
"""The share of the cores that other programs may have for a turn to count."""
TRY_S = 60.0
"""For how long each measurement that the prediction is made from is repeated until one is quiet."""
FEWEST = 4
"""Quiet turns without which the quietest half counts."""
ROUNDS_A_WORD = 5


@dataclass
class Dial:
    """A `Speed` that can be turned while links use it."""

    latency_s: float
    bytes_per_s: float


def ranks_do(settings: dict[str, Any], channel: Any) -> dict[str, Any]:
    """On every rank."""
    torch.set_num_threads(1)
    real = settings.get("real", False)
    me = join(backend=BACKENDS["shoal"], emulate=None if real else "2x1, 10us, 20GB/s | 50us, 1Gb/s")
    turn_to = _limit if real else _dial()
    plain = dist.new_group(backend="gloo")
    turn_to(FREE)
    group: Any = dist.new_group(backend=BACKENDS["shoal"])

    def say(text: str) -> None:
        if me.rank == 0:
            channel.say({"event": "progress", "text": text}) if channel else print(text, file=sys.stderr, flush=True)

    job = replace(load_job(settings["job"]), global_batch=settings["batch"])
    terms = [parse(f"dp(2, compress={text})").dp_levels[0].compress for text in settings["compressions"]]
    dense = ByShoal(job, me, "dp(2)")
    squeezed = {term: ByShoal(job, me, f"dp(2, compress={term})") for term in terms}

    others = Others(plain)
    end_s = slower(time.monotonic() + settings["seconds"], plain)
    ends = others.quietest(lambda: measure_ends(group, framed=FRAMED))
    ends = others.quietest(lambda own=ends: with_background(own, group, turn_to))
    turn_to(FREE)
    say("the link's ends are measured")
    engine = dense.prepared.engine
    computing = others.quietest(lambda: measure_computing(dense.step, engine, ends, group))
    setting = Setting(computing=computing, ends=ends, latency_s=0.0 if real else LATENCY_S)
    say("a step's computing is measured")
    times = others.quietest(lambda: measure_codecs(terms=terms, together=lambda: dist.barrier(group=plain)))
    codecs = {}
    for term in terms:
        tensor_s, element_s = (slower(seconds, plain) for seconds in times[str(term)])
        codecs[term] = Codec(tensor_s=tensor_s, element_s=element_s)
    say("the codecs are measured")

    # All from figures that are the same on both ranks, so both turn to the same bandwidths.
    predicted = {term: setting.overtakes(term, codec) for term, codec in codecs.items()}
    tried = {term: [part * min(max(at, 1e6), 2.5e9) for part in AROUND] for term, at in predicted.items()}
    rows: dict[Any, list[dict[str, Any]]] = {
        term: [{"bytes_per_s": rate, "dense_s": [], "compressed_s": []} for rate in rates]
        for term, rates in tried.items()
    }
    round_ = 0
    while round_ <= FEWEST or (not _enough(rows, settings["rounds"]) and slower(time.monotonic(), plain) < end_s):
        for term in terms:
            for row in rows[term]:
                turn_to(row["bytes_per_s"])
                turns = {}
                for name, who in (("dense_s", dense), ("compressed_s", squeezed[term])):
                    others.since()
                    start_s = time.perf_counter()
                    who.step(round_)
                    turns[name] = slower(time.perf_counter() - start_s, plain), others.share()
                if round_:
                    for name, turn in turns.items():
                        row[name].append(turn)
        if round_ % ROUNDS_A_WORD == 0:
            quiet = min(_quiet(row) for of_term in rows.values() for row in of_term)
            say(f"round {round_}: {quiet} quiet turns of {settings['rounds']}")
        round_ += 1
    turn_to(FREE)
    leave()
    return {
        "setting": asdict(setting),
        "codecs": {str(term): asdict(codec) for term, codec in codecs.items()},
        "rows": {str(term): [_counted(row) for row in of_term] for term, of_term in rows.items()},
        "rounds": round_ - 1,
        "disturbed": others.most,
    }


class Others:
    """What other programs have of the cores, by the kernel's counters, while both ranks work."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.most = 0.0
        """The largest share in what the prediction is made from."""
        self.since()

    def since(self) -> None:
        """Starts to count, on all ranks together."""
        dist.barrier(group=self.group)
        self._before = self._now()

    def share(self) -> float:
        """Of all cores' time since then; the same on all ranks."""
        busy_s, mine_s, wall_s = (now - before for now, before in zip(self._now(), self._before, strict=True))
        ours_s = torch.tensor([mine_s], dtype=torch.float64)
        dist.all_reduce(ours_s, group=self.group)
        return slower((busy_s - float(ours_s)) / (wall_s * (os.cpu_count() or 1)), self.group)

    def quietest(self, measure: Callable[[], Any]) -> Any:
        """The result of the first measurement that hardly anyone disturbed, or of the least disturbed one."""
        tried: list[tuple[float, Any]] = []
        until_s = slower(time.monotonic() + TRY_S, self.group)
        while not tried or (tried[-1][0] > QUIET and slower(time.monotonic(), self.group) < until_s):
            self.since()
            found = measure()
            tried.append((self.share(), found))
        share, found = min(tried, key=lambda pair: pair[0])
        self.most = max(self.most, share)
        return found

    def _now(self) -> tuple[float, float, float]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        # All but idling, waiting for a disk, and interrupts: those are mostly the packets of these ranks.
        busy = sum(ticks) - sum(ticks[3:7])
        # With what a rank has started, as `tc`, which is not another program's.
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        mine_s = sum(each.ru_utime + each.ru_stime for each in used)
        return busy / os.sysconf("SC_CLK_TCK"), mine_s, time.perf_counter()


def _quiet(row: dict[str, Any]) -> int:
    """Turns of the rarer kind that nobody disturbed."""
    return min(sum(share <= QUIET for _, share in row[name]) for name in ("dense_s", "compressed_s"))


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    """The seconds of the turns that count: the quiet ones, or the quietest half where there are few."""
    found = {**row, "quiet": _quiet(row)}
    for name in ("dense_s", "compressed_s"):
        turns = sorted(row[name], key=lambda turn: turn[1])
        quiet = [turn for turn in turns if turn[1] <= QUIET]
        chosen = quiet if len(quiet) >= FEWEST else turns[: max(FEWEST, len(turns) // 2)]
        found[name] = [seconds for seconds, _ in chosen]
    return found


def _enough(rows: dict[Any, list[dict[str, Any]]], wanted: int) -> bool:
    return all(_quiet(row) >= wanted for of_term in rows.values() for row in of_term)


def _dial() -> Callable[[float], None]:
    """Makes the links of this job, from now on, read their speed from a dial."""
    dial = Dial(LATENCY_S, FREE)
    assert emulated.emulator is not None
    links = Emulation(2, 1, dial, dial)  # type: ignore[arg-type]
    emulated.emulate(emulated.Emulator(links, emulated.emulator.wires))

    def turn_to(bytes_per_s: float) -> None:
        dial.bytes_per_s = bytes_per_s

    return turn_to


def _limit(bytes_per_s: float) -> None:
    """Holds what leaves this host to a rate."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], capture_output=True, check=False)
    if bytes_per_s < FREE:
        subprocess.run(["tc", "qdisc", "add", "dev", interface, "root", *limit_words(8 * bytes_per_s)], check=True)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    answer = ranks_do(given, None)
    if os.environ["RANK"] == "0":
        Path(given["into"]).write_text(json.dumps(answer))
