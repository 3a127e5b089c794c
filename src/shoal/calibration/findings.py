"""What follows from the measured times: the links' constants, the fastest backend, and the file that says so.

Of a contestant's rounds the lower quartile counts: other programs only ever add time. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from shoal.calibration.fit import Fit, Timed, fit_link
from shoal.calibration.machine import alpha_beta, lower_quartile, machine_of
from shoal.comm.calibration import BACKENDS, WrongCalibration, read_calibration_file
from shoal.comm.choice import choose_all_reduce
from shoal.comm.network import DEFAULT, NetworkTimes
from shoal.estimate.steps.machine import Curve, Machine
from shoal.estimate.steps.read import machine_here, table_of_machine
from shoal.files.toml import toml_text

DISTURBED, TOO_MUCH_DISTURBED = 0.15, 0.4
"""The share of the time that other programs may take before it is warned of, and before the figures are of no use."""
LARGE_ERROR = 0.5
"""Of a link's model, as a share of the time: beyond it the times are hardly those of a link."""
MESSAGES = "messages"
"""The name of rows of single messages: from the first rank to the second and back, halved."""
HEADING = "What `shoal calibrate` measured; jobs started here choose by it. Delete it to go back to the defaults.\n"
SHOWN_BYTES = [1 << power for power in range(10, 29)]


class CannotCalibrate(ValueError):
    """A calibration that cannot be made or written as asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """A calibration as it was measured."""

    date: str
    ranks: int
    hosts: int
    cores: int
    torch: str
    rounds: int
    disturbed: float
    """The share of the time in which a rank wanted a core and another program had it."""
    links: dict[str, Fit]
    over_best: dict[str, float]
    """Of each kind of link, the time of the algorithms that the model chooses over that of the best ones, as measured:
    geometric mean over sizes."""
    link_ranks: dict[str, int]
    times: list[dict[str, Any]]
    """Of each collective and size, the seconds that each backend took."""
    relative_time: dict[str, float]
    """Of each backend, its time over that of the fastest: geometric mean over collectives and sizes."""
    fastest: str
    machine: Machine | None = None
    """What ranks compute; None where only links were measured."""
    machine_errors: Mapping[str, float] = field(default_factory=dict)
    """Of each kind of product, how far its model is from the times at the median."""

    @property
    def network(self) -> NetworkTimes:
        """What was measured; what was not is as it would be without a calibration."""
        found = {name: fit.link for name, fit in self.links.items()}
        return NetworkTimes(inside=found.get("inside", DEFAULT.inside), between=found.get("between", DEFAULT.between))

    @property
    def usable(self) -> bool:
        """Whether they say more of this machine than of what else it did."""
        return self.disturbed <= TOO_MUCH_DISTURBED and all(fit.error <= LARGE_ERROR for fit in self.links.values())

    @property
    def warnings(self) -> list[str]:
        found = []
        if self.disturbed > DISTURBED:
            found.append(
                f"other programs had the cores {100 * self.disturbed:.0f}% of the time: the figures are those of a "
                "busy machine; measure again when it is idle"
            )
        if self.ranks > self.cores * self.hosts:
            found.append(f"{self.ranks} ranks shared {self.cores} cores: messages waited for a turn, not for the links")
        found += [
            f"links {name} hosts: the model is {100 * fit.error:.0f}% off, so its choice of an algorithm may be wrong"
            for name, fit in self.links.items()
            if fit.error > LARGE_ERROR
        ]
        return found

    def choices(self, name: str) -> list[tuple[int, str]]:
        """By which algorithm the measured ranks would reduce from how many bytes on."""
        ranks = self.link_ranks[name]
        per_host = ranks if name == "inside" else 1
        found: list[tuple[int, str]] = []
        for nbytes in SHOWN_BYTES:
            algorithm = choose_all_reduce(nbytes, ranks, per_host, self.network)
            if not found or found[-1][1] != algorithm:
                found.append((nbytes, algorithm))
        return found

    def to_json(self) -> dict[str, Any]:
        choices = {name: [list(choice) for choice in self.choices(name)] for name in self.links}
        links = {name: {**asdict(fit.link), "error": fit.error} for name, fit in self.links.items()}
        return {**asdict(self), "links": links, "choices": choices, "warnings": self.warnings}


def findings_of(measured: dict[str, Any]) -> Findings:
    """`measured` is what `measure.measure` gives."""
    rows = [{**row, "seconds": lower_quartile(row["seconds"])} for row in measured["rows"]]
    links, over_best = {}, {}
    for name, ranks in measured["links"].items():
        timed = [Timed(row["by"], row["bytes"], row["seconds"]) for row in rows if row["where"] == name]
        links[name] = fit_link(timed, ranks=ranks)
        over_best[name] = _over_best(timed, ranks, links[name])
    by_call: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["where"] == "backends":
            by_call.setdefault((row["what"], row["bytes"]), {})[row["by"]] = row["seconds"]
    times = [{"collective": what, "bytes": nbytes, "seconds": each} for (what, nbytes), each in by_call.items()]
    means = {name: geometric_mean([each[name] for each in by_call.values()]) for name in next(iter(by_call.values()))}
    # NCCL is timed where there are GPUs, on their tensors: it is no rival of those that carry host memory.
    fastest = min((name for name in means if name in BACKENDS), key=means.__getitem__)
    machine, errors = machine_of(measured["machine"], _curves(rows, fastest)) if "machine" in measured else (None, {})
    return Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        ranks=measured["ranks"],
        hosts=measured["hosts"],
        cores=len(os.sched_getaffinity(0)),
        torch=measured["torch"],
        rounds=len(measured["rows"][0]["seconds"]),
        disturbed=measured["disturbed"],
        links=links,
        over_best=over_best,
        link_ranks=measured["links"],
        times=times,
        relative_time={name: mean / means[fastest] for name, mean in means.items()},
        fastest=fastest,
        machine=machine,
        machine_errors=errors,
    )


def _curves(rows: Sequence[Mapping[str, Any]], backend: str) -> dict[str, Curve]:
    """Of each collective, and of single messages, its times by one backend."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["where"] in ("backends", MESSAGES) and row["by"] == backend:
            found.setdefault(row["what"], {})[float(row["bytes"])] = row["seconds"]
    return {
        what: Curve(tuple(sorted(each)), tuple(each[size] for size in sorted(each))) for what, each in found.items()
    }


def _over_best(timed: Sequence[Timed], ranks: int, fit: Fit) -> float:
    network = NetworkTimes(inside=fit.link, between=fit.link)
    ratios = []
    for nbytes in {each.nbytes for each in timed}:
        seconds = {each.algorithm: each.seconds for each in timed if each.nbytes == nbytes}
        ratios.append(seconds[choose_all_reduce(nbytes, ranks, ranks, network)] / min(seconds.values()))
    return geometric_mean(ratios)


def as_toml(findings: Findings) -> str:
    """The file's text, four digits of each number, with units and origins as comments."""
    from shoal.files.schema import BackendTable, CalibrationFile, LinksTable, MachineTable, MeasuredTable
    from shoal.files.table import checked

    of = findings
    notes = {
        "links.between": "Between ranks of different hosts: TCP."
        if of.hosts > 1
        else "Between hosts: TCP on this host's loopback, so the cost of the TCP stack without that of a network."
    }
    links: dict[str, Any] = {}
    for name, link in asdict(of.network).items():
        links[name] = _rounded(link)
        notes[f"links.{name}.byte_s"] = f"seconds a byte: {1e-9 / link['byte_s']:.3g} GB/s"
        if name in of.links:
            links[name] |= _rounded({"error": of.links[name].error, "over_best": of.over_best[name]})
        else:
            notes[f"links.{name}"] = "Not measured (one rank on each host): the default."
    if of.machine is not None:
        for kind, curve in of.machine.collectives.items():
            latency_s, byte_s = alpha_beta(curve)
            notes[f"machine.collectives.{kind}"] = f"About {latency_s:.3g} s and {byte_s:.3g} s a byte."
    file = CalibrationFile(
        measured=MeasuredTable(
            date=datetime.fromisoformat(of.date),
            ranks=of.ranks,
            hosts=of.hosts,
            cores=of.cores,
            torch=of.torch,
            rounds=of.rounds,
            disturbed=_rounded(of.disturbed),
        ),
        links=checked(LinksTable, links),
        backend=checked(BackendTable, {"fastest": of.fastest, "relative_time": _rounded(of.relative_time)}),
        machine=checked(MachineTable, _rounded(table_of_machine(of.machine, of.machine_errors).model_dump()))
        if of.machine is not None
        else None,
    )
    return toml_text(file, heading=HEADING, notes=notes)


def _rounded(values: Any) -> Any:
    """To four digits: more of them were not measured."""
    match values:
        case float():
            return float(f"{values:.4g}")
        case Mapping():
            return {key: _rounded(value) for key, value in values.items()}
        case list():
            return [_rounded(value) for value in values]
    return values


def _with_machine(findings: Findings, path: Path) -> Findings:
    """Several hosts have their links measured; what was measured of a host before stays."""
    if findings.machine is not None:
        return findings
    with contextlib.suppress(WrongCalibration):
        return replace(findings, machine=machine_here(path))
    return findings


def write_findings(findings: Findings, path: Path) -> None:
    """All of the file or nothing of it, and only what can be read back."""
    # In the same folder: renaming is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(as_toml(_with_machine(findings, path)), encoding="utf-8")
            read_calibration_file(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CannotCalibrate(f"{path} cannot be written: {error.strerror}; name another file by --output") from error
