"""Rules about rounds of islands: when fragments of a model are sent, and when they arrive."""

from __future__ import annotations

from shoal.strategy.legality.rule import Breach, Case, RuleTable
from shoal.strategy.terms.axes import dp
from shoal.strategy.terms.compress import none
from shoal.strategy.terms.numerals import counted

rule = RuleTable()


@rule(dp, why="Each fragment of a model is sent once in h steps, and no two after the same step.")
def fragments_have_steps_of_their_own(case: Case, index: int, level: dp) -> Breach | None:
    given = level.sync.values()
    h, fragments = given.get("h", 0), given.get("fragments", 1)
    if fragments == 1 or fragments <= h:
        return None
    return Breach(
        level,
        f"{fragments} fragments cannot be sent after different steps of a period of {counted(h, 'step')}",
        lambda: [
            case.changed(index, sync=level.sync.replace(fragments=h)),
            case.changed(index, sync=level.sync.replace(h=fragments)),
        ],
    )


@rule(dp, why="A fragment must have arrived before it is sent again.")
def rounds_do_not_overtake(case: Case, index: int, level: dp) -> Breach | None:
    given = level.sync.values()
    h, overlap = given.get("h", 0), given.get("overlap", 0)
    if not overlap or overlap < h:
        return None
    return Breach(
        level,
        f"a round that is applied {counted(overlap, 'step')} after it was sent is still on its way when the next one, "
        f"{counted(h, 'step')} later, is sent",
        lambda: [
            case.changed(index, sync=level.sync.replace(overlap=h - 1)),
            case.changed(index, sync=level.sync.replace(overlap=0, eager=True)),
            case.changed(index, sync=level.sync.replace(h=overlap + 1)),
        ],
    )


@rule(dp, why="An eager round is one that is h steps late already.")
def eager_rounds_are_late_already(case: Case, index: int, level: dp) -> Breach | None:
    given = level.sync.values()
    if not given.get("eager") or not given.get("overlap"):
        return None
    return Breach(
        level,
        f"eager=True applies a round when the next one is sent, overlap={given['overlap']} before that; only one of "
        "them can hold",
        lambda: [
            case.changed(index, sync=level.sync.replace(overlap=0)),
            case.changed(index, sync=level.sync.replace(eager=False)),
        ],
    )


@rule(dp, why="A compressed exchange takes several collectives, each of which needs the answer to the one before.")
def compressed_rounds_are_not_late(case: Case, index: int, level: dp) -> Breach | None:
    given = level.sync.values()
    late = "eager=True" if given.get("eager") else f"overlap={given['overlap']}" if given.get("overlap") else ""
    merged = 'merge="radial"' if given.get("merge") == "radial" else ""
    if isinstance(level.compress, none) or not (late or merged):
        return None
    what = (
        f"{late} keeps a round on the wire while steps go on, and a compressed one cannot be left alone"
        if late
        else f"{merged} needs the norm of what each island sends, and compression changes it"
    )
    plain = {name: value for name, value in {"eager": False, "overlap": 0, "merge": "mean"}.items() if name in given}
    return Breach(
        level,
        what,
        lambda: [case.changed(index, compress=none()), case.changed(index, sync=level.sync.replace(**plain))],
    )


@rule(dp, why="An optimiser that begins anew, or is averaged, is so for all parameters, when all are exchanged.")
def resets_come_with_full_rounds(case: Case, index: int, level: dp) -> Breach | None:
    given = level.sync.values()
    if (wrong := _periods_of_moments(case, index, level)) is not None:
        return wrong
    parts = {"fragments": 1, "overlap": 0, "eager": False, "blend": 0.0}
    changed = [name for name, plain in parts.items() if given.get(name, plain) != plain]
    if given.get("state") not in ("reset", "averaged") or not changed:
        return None
    return Breach(
        level,
        f"{changed[0]}={given[changed[0]]} exchanges the parameters at different times or not fully, and "
        f'state="{given["state"]}" is for all of them at once',
        lambda: [
            case.changed(index, sync=level.sync.replace(state="local")),
            case.changed(index, sync=level.sync.replace(**{name: parts[name] for name in changed})),
        ],
    )


def _periods_of_moments(case: Case, index: int, level: dp) -> Breach | None:
    """Moments are averaged with parameters, though less often."""
    given = level.sync.values()
    h, periods = given.get("h", 1), {name: given[name] for name in ("m", "v") if given.get(name)}
    wrong = next((name for name, period in periods.items() if period % h), "")
    if periods and given.get("state") != "averaged":
        name = next(iter(periods))
        reason = f'{name}={periods[name]} is how often moments are averaged, which state="{given["state"]}" does not do'
        return Breach(
            level,
            reason,
            lambda: [
                case.changed(index, sync=level.sync.replace(state="averaged")),
                case.changed(index, sync=level.sync.replace(**dict.fromkeys(periods, 0))),
            ],
        )
    if wrong:
        reason = f"{wrong}={periods[wrong]} is no multiple of the {counted(h, 'step')} between two exchanges"
        fits = max(1, periods[wrong] // h) * h
        return Breach(level, reason, lambda: [case.changed(index, sync=level.sync.replace(**{wrong: fits}))])
    return None


@rule(dp, why="Steps in which gradients are summed over islands send them as they are.")
def a_synchronous_start_is_dense(case: Case, index: int, level: dp) -> Breach | None:
    compressing = [place for place, other in case.levels() if not isinstance(other.compress, none)]
    if not level.sync.values().get("start") or not compressing:
        return None
    return Breach(
        level,
        f"the first {counted(level.sync.values()['start'], 'step')} sum gradients over all islands, uncompressed, and "
        f"{case.strategy.terms[compressing[0]]} compresses",
        lambda: [
            case.changed(index, sync=level.sync.replace(start=0)),
            case.changed(compressing[0], compress=none()),
        ],
    )


@rule(dp, why="A round needs no more moves than there are replicas to send one.")
def quorums_can_be_reached(case: Case, index: int, level: dp) -> Breach | None:
    quorum = level.sync.values().get("quorum", 0)
    if quorum <= level.n:
        return None
    return Breach(
        level,
        f"a round would wait for {counted(quorum, 'move')}, and {counted(level.n, 'replica')} send one each",
        lambda: [case.changed(index, sync=level.sync.replace(quorum=level.n)), *case.resized(index, [quorum])],
    )


@rule(dp, why="With a quorum the first replica merges moves whenever they come; no collective of all carries them.")
def quorums_merge_plain_moves(case: Case, index: int, level: dp) -> Breach | None:
    given = level.sync.values()
    if not given.get("quorum"):
        return None
    without = lambda: case.changed(index, sync=level.sync.replace(quorum=0))  # noqa: E731
    if given.get("eager"):
        reason = "eager=True takes the moves of all a round late, and a quorum takes those that are there"
        return Breach(level, reason, lambda: [case.changed(index, sync=level.sync.replace(eager=False)), without()])
    if given.get("state", "local") != "local":
        reason = f'state="{given["state"]}" is for all replicas at one step, and under a quorum each has its own'
        return Breach(level, reason, lambda: [case.changed(index, sync=level.sync.replace(state="local")), without()])
    if not isinstance(level.compress, none):
        reason = f"{level.compress} compresses what collectives sum, and under a quorum each replica sends its own move"
        return Breach(level, reason, lambda: [case.changed(index, compress=none()), without()])
    return None
