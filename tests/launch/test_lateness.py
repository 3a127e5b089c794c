"""Who is late, judged from reports: no process is started."""

from __future__ import annotations

import json
from typing import Any

from shoal.launch.lateness import Entered, Report, judge


def entered(
    number: int, *, kind: str = "all_reduce", ago_s: float = 12.3, axis: str = "dp", members: Any = (0, 1)
) -> Entered:
    return Entered(number=number, kind=kind, phase="gradient", axis=axis, ago_s=ago_s, members=tuple(members))


def report(
    at: str = "train.py:88 in compute", *, done: bool = False, idle_s: float = 12.0, **groups: Entered
) -> Report:
    return Report(groups=groups, at=at, idle_s=idle_s, done=done)


def test_the_member_with_the_smallest_number_is_late() -> None:
    verdict = judge({0: report(a=entered(57)), 1: report(a=entered(56, ago_s=12.6))}, {})
    assert verdict.late == (1,)
    assert verdict.message == (
        "rank 1 is late: it has not entered all_reduce number 57 (axis dp, phase gradient), which rank 0 "
        "entered 12.3 s ago; rank 1 is at train.py:88 in compute (no new collective for 13 s)"
    )


def test_a_member_that_has_entered_nothing_yet_is_late() -> None:
    verdict = judge({0: report(), 1: report(a=entered(1))}, {})
    assert verdict.late == (0,)
    assert "not entered all_reduce number 1" in verdict.message
    assert "no collective so far" in verdict.message


def test_several_late_ranks_are_all_named() -> None:
    everyone = range(4)
    verdict = judge({r: report(a=entered(5 if r else 6, members=everyone)) for r in everyone}, {})
    assert verdict.late == (1, 2, 3)
    assert verdict.message.startswith("ranks 1, 2 and 3 are late: they have not entered all_reduce number 6")


def test_asynchronous_collectives_further_on_are_told_as_such() -> None:
    verdict = judge({0: report(a=entered(59)), 1: report(a=entered(56))}, {})
    assert (
        "not entered collective number 57 of axis dp, while rank 0 went on to all_reduce number 59" in verdict.message
    )


def test_a_rank_that_waits_for_another_is_not_the_cause() -> None:
    # 0 waits for 1 along dp; 1 waits for 3 along tp; 3 computes.
    along_dp, along_tp = {"members": (0, 1), "axis": "dp"}, {"members": (1, 3), "axis": "tp"}
    reports = {
        0: report(dp=entered(8, **along_dp)),
        1: report(dp=entered(7, **along_dp), tp=entered(21, **along_tp)),
        2: report(),
        3: report("model.py:5 in forward", tp=entered(20, **along_tp)),
    }
    verdict = judge(reports, {})
    assert verdict.late == (3,)
    assert "rank 3 is at model.py:5 in forward" in verdict.message


def test_a_rank_outside_a_group_is_not_late_in_it() -> None:
    reports = {0: report(a=entered(3)), 1: report(a=entered(3)), 2: report()}
    assert judge(reports, {}).late == ()


def test_a_rank_that_ended_its_work_is_told_so() -> None:
    verdict = judge({0: report(a=entered(2)), 1: report(a=entered(1), done=True)}, {})
    assert verdict.late == (1,)
    assert verdict.message.endswith("rank 1 has ended its work")


def test_a_silent_rank_is_late_with_what_is_known_of_its_process() -> None:
    verdict = judge({0: report(a=entered(4, ago_s=9.0), b=entered(9, ago_s=3.0))}, {1: "its process 12 has exited"})
    assert verdict.late == (1,)
    assert verdict.message == (
        "rank 1 is late: its process 12 has exited; rank 0 has waited for it in all_reduce number 9 (axis dp, "
        "phase gradient) for 3.0 s"
    )


def test_different_collectives_of_one_number_are_a_disagreement() -> None:
    everyone = range(3)
    reports = {
        r: report(a=entered(4, kind="broadcast" if r == 2 else "all_reduce", members=everyone)) for r in everyone
    }
    verdict = judge(reports, {})
    assert verdict.late == (2,)
    assert verdict.message.startswith("ranks entered different collectives: rank 2 entered broadcast number 4")


def test_numbers_of_sends_and_receives_are_not_compared() -> None:
    reports = {0: report(a=entered(9, kind="send")), 1: report(a=entered(3, kind="recv"))}
    verdict = judge(reports, {})
    assert verdict.late == ()
    assert verdict.message.startswith("no rank has made progress for 12 s; rank 0 is at")


def test_a_report_survives_its_way_through_the_store() -> None:
    given = report("ü.py:1 in <module>", a=entered(3), b=entered(10**12, kind="barrier"), done=True)
    assert Report.from_json(json.loads(json.dumps(given.to_json()))) == given
