"""What each rank of a pipeline does when: simulated with a forward of one unit and a full backward of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.api.drawable import CannotDraw, require_drawable
from shoal.strategy import Strategy
from shoal.strategy.terms import pp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.estimate.pipeline.simulate import PipelineTimeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The passes of a strategy's pipeline, as values, text and a picture."""

    term: pp
    simulated: PipelineTimeline

    def to_svg(self) -> str:
        """The timeline as a picture."""
        from shoal.pictures.timeline import timeline_svg

        return timeline_svg(self.simulated, str(self.term))

    def rows(self, *, width: int) -> Iterator[list[tuple[str, str]]]:
        """Lines of (what, text) for a terminal that is `width` characters wide."""
        from shoal.pictures.timeline import timeline_rows

        return timeline_rows(self.simulated, width=width)

    def captions(self) -> list[str]:
        """Bubble, formula and what is kept, in words."""
        from shoal.pictures.timeline import captions

        return captions(self.simulated)

    def to_json(self) -> dict[str, Any]:
        """Every pass with its times."""
        from shoal.estimate.pipeline.simulate import bubble_formula, bubble_formula_text
        from shoal.pictures.timeline import timeline_text

        term, timeline = self.term, self.simulated
        return {
            "unit": "a forward through one stage; a full backward takes two",
            "schedule": term.schedule,
            "ranks": term.n,
            "chunks": term.chunks,
            "micro": term.micro,
            "makespan": timeline.makespan_s,
            "bubble": timeline.bubble,
            "bubble_formula": bubble_formula(term),
            "formula": bubble_formula_text(term),
            "steady_bubble": timeline.steady_bubble,
            "idle": list(timeline.idle_s),
            "in_flight": list(timeline.in_flight),
            "text": timeline_text(timeline).splitlines(),
            "lanes": [
                [
                    {
                        "kind": box.action.kind,
                        "stage": box.action.stage,
                        "micro": box.action.micro,
                        "start": box.start_s,
                        "stop": box.stop_s,
                    }
                    for box in lane
                ]
                for lane in timeline.lanes
            ],
        }


def timeline_of(strategy: Strategy) -> Timeline:
    """Simulates a strategy's pipeline; a CannotDraw says why it has no timeline."""
    from shoal.estimate.pipeline.simulate import simulate_term

    term = strategy.term(pp)
    if term is None:
        raise CannotDraw(
            f"{strategy} has no pipeline, so there is no timeline to draw; "
            "give a strategy with pp, for example \"pp(4, '1f1b', micro=8)\""
        )
    passes = 3 if term.schedule == "zero-bubble" else 2
    require_drawable(str(term), passes * term.n * term.chunks * term.micro)
    return Timeline(term=term, simulated=simulate_term(term))
