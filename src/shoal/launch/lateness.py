"""Which rank holds the others up: a verdict on the reports that ranks give when nothing moves any more.

Every rank numbers the collectives it enters in each group. All members of a group enter the same ones, so the
member with the smallest number is the one the others wait for. Pure functions on plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

POINT_TO_POINT = ("send", "recv")
"""Members of a group may rightly differ in how many of these they enter."""
SHOWN = 4
"""Ranks whose stacks a verdict has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """The last collective a rank entered in one group, and the group's members."""

    number: int
    kind: str
    phase: str
    axis: str
    ago_s: float
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} number {self.number} (axis {self.axis}, phase {self.phase})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank reports about itself. Times are seconds before the report: clocks of hosts differ."""

    groups: Mapping[str, Entered]
    at: str
    idle_s: float
    done: bool = False
    stack: tuple[str, ...] = ()
    """Of its main thread, outermost first, without libraries."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        groups = {
            label: Entered(**{**entered, "members": tuple(entered["members"])})
            for label, entered in data["groups"].items()
        }
        return Report(
            groups=groups, at=data["at"], idle_s=data["idle_s"], done=data["done"], stack=tuple(data.get("stack", ()))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The late ranks (none if they cannot be determined) and the sentence for the user."""

    late: tuple[int, ...]
    message: str
    stack: str = ""
    """Where the late ranks are, or all if none is."""


def judge(reports: Mapping[int, Report], silent: Mapping[int, str]) -> Verdict:
    """`silent` holds the ranks that did not answer, each with what is known of its process."""
    if silent:
        found = _silent(reports, silent)
    else:
        found = _behind(reports) or _disagreeing(reports) or _nobody(reports)
    shown = [rank for rank in found.late or sorted(reports) if rank in reports and reports[rank].stack][:SHOWN]
    return replace(found, stack="\n".join(f"rank {rank}:\n  " + "\n  ".join(reports[rank].stack) for rank in shown))


def _silent(reports: Mapping[int, Report], silent: Mapping[int, str]) -> Verdict:
    parts = [f"rank {rank} is late: {state}" for rank, state in sorted(silent.items())]
    waiting = [
        (entered.ago_s, rank, entered)
        for rank, report in reports.items()
        for entered in report.groups.values()
        if set(entered.members) & set(silent)
    ]
    if waiting:
        # The last collective that was entered is the one that is waited in.
        ago_s, rank, entered = min(waiting, key=lambda item: item[:2])
        parts.append(f"rank {rank} has waited for it in {entered} for {ago_s:.1f} s")
    return Verdict(late=tuple(sorted(silent)), message="; ".join(parts))


def _behind(reports: Mapping[int, Report]) -> Verdict | None:
    waited_for: dict[str, list[int]] = {}
    waiting: set[int] = set()
    for label, members in _groups(reports).items():
        numbers = {rank: _number(reports[rank], label) for rank in members}
        least, most = min(numbers.values()), max(numbers.values())
        if least < most:
            waited_for[label] = [rank for rank in members if numbers[rank] == least]
            waiting |= {rank for rank in members if numbers[rank] > least}
    if not waited_for:
        return None
    # A rank that is late in one group because it waits in another is not the cause.
    causes = {label: [rank for rank in late if rank not in waiting] or late for label, late in waited_for.items()}
    rooted = {label: late for label, late in causes.items() if not set(late) & waiting} or causes

    def waited_s(label: str) -> float:
        return max(r.groups[label].ago_s for r in reports.values() if label in r.groups)

    label = max(rooted, key=lambda name: (waited_s(name), name))
    return _late(reports, label, rooted[label])


def _late(reports: Mapping[int, Report], label: str, late: Sequence[int]) -> Verdict:
    least = _number(reports[late[0]], label)
    ahead = {
        rank: report.groups[label]
        for rank, report in reports.items()
        if label in report.groups and report.groups[label].number > least
    }
    first, entered = min(ahead.items(), key=lambda item: (item[1].number, -item[1].ago_s))
    one = len(late) == 1
    ranks = f"rank {late[0]} is late: it has" if one else f"ranks {_listed(late)} are late: they have"
    if entered.number == least + 1:
        what = f"not entered {entered}, which rank {first} entered {entered.ago_s:.1f} s ago"
    else:
        what = (
            f"not entered collective number {least + 1} of axis {entered.axis}, while rank {first} went on "
            f"to {entered}, entered {entered.ago_s:.1f} s ago"
        )
    where = "; ".join(_place(rank, reports[rank]) for rank in late[:4])
    return Verdict(late=tuple(late), message=f"{ranks} {what}; {where}")


def _disagreeing(reports: Mapping[int, Report]) -> Verdict | None:
    for label, members in sorted(_groups(reports).items()):
        entered = {rank: reports[rank].groups[label] for rank in members if label in reports[rank].groups}
        kinds = [call.kind for call in entered.values()]
        if len(set(kinds)) > 1:
            usual = max(kinds, key=kinds.count)
            odd = [rank for rank, call in entered.items() if call.kind != usual]
            other = next(rank for rank, call in entered.items() if call.kind == usual)
            message = (
                f"ranks entered different collectives: rank {odd[0]} entered {entered[odd[0]]}, "
                f"rank {other} entered {entered[other]}; {_place(odd[0], reports[odd[0]])}"
            )
            return Verdict(late=tuple(odd), message=message)
    return None


def _nobody(reports: Mapping[int, Report]) -> Verdict:
    places = "; ".join(_place(rank, report) for rank, report in sorted(reports.items())[:8])
    idle_s = min((report.idle_s for report in reports.values() if not report.done), default=0.0)
    return Verdict(late=(), message=f"no rank has made progress for {idle_s:.0f} s; {places}")


def _groups(reports: Mapping[int, Report]) -> dict[str, list[int]]:
    """Members of each group whose numbers can be compared."""
    found: dict[str, list[int]] = {}
    mixed: set[str] = set()
    for report in reports.values():
        for label, entered in report.groups.items():
            found[label] = [rank for rank in entered.members if rank in reports]
            if entered.kind in POINT_TO_POINT:
                mixed.add(label)
    return {label: members for label, members in found.items() if label not in mixed and members}


def _number(report: Report, label: str) -> int:
    return report.groups[label].number if label in report.groups else 0


def _place(rank: int, report: Report) -> str:
    if report.done:
        return f"rank {rank} has ended its work"
    last_s = min((entered.ago_s for entered in report.groups.values()), default=None)
    since = "no collective so far" if last_s is None else f"no new collective for {last_s:.0f} s"
    return f"rank {rank} is at {report.at} ({since})"


def _listed(ranks: Sequence[int]) -> str:
    *most, last = (str(rank) for rank in ranks)
    return f"{', '.join(most)} and {last}" if most else last
