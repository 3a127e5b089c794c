"""What was published of DDP, ZeRO, intra-layer and inter-layer on Lassen and ThetaGPU is predicted in kind."""

from __future__ import annotations

import pytest
from benchmarks.comparison_predicted import curves, findings, other_settings


def test_every_finding_holds_in_kind() -> None:
    assert [what for what, _, _, holds in findings() if not holds] == []


@pytest.mark.parametrize("place", ["lassen", "thetagpu"])
def test_memory_curves_have_their_published_shapes(place: str) -> None:
    here = {name: [each.memory_gb for each in points.values()] for name, points in curves(place).items()}
    assert here["DDP"] == pytest.approx([here["DDP"][0]] * 7)
    assert here["ZeRO"] == sorted(here["ZeRO"], reverse=True)
    bottom = here["intra-layer"].index(min(here["intra-layer"]))
    assert here["intra-layer"][: bottom + 1] == sorted(here["intra-layer"][: bottom + 1], reverse=True)
    assert here["intra-layer"][bottom:] == sorted(here["intra-layer"][bottom:])
    assert 0 < bottom < len(here["intra-layer"]) - 1


def test_messages_dominate_intra_layer_across_nodes_under_every_assumption() -> None:
    assert all(float(row[-1].rstrip("%")) > 50 for row in other_settings())


def test_intra_layer_is_hurt_by_leaving_the_node() -> None:
    lassen, theta = (curves(place)["intra-layer"] for place in ("lassen", "thetagpu"))
    assert lassen[8].messages > 1.5 * lassen[4].messages
    assert theta[16].messages > theta[8].messages
    assert theta[8].messages < lassen[8].messages
