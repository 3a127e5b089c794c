"""What was published of DDP, ZeRO, intra-layer and inter-layer on Lassen and ThetaGPU is predicted in kind."""

from __future__ import annotations

import pytest
from benchmarks import comparison_images as images
from benchmarks.comparison_predicted import curves, findings, image_findings, other_settings, shares


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_every_finding_holds_in_kind(precision: str) -> None:
    assert [what for what, _, _, holds in [*findings(precision), *image_findings()] if not holds] == []


def test_vgg16_is_counted_and_its_gradients_are_felt_between_nodes() -> None:
    work = images.vgg16()
    assert work.parameters == 138_357_544
    assert work.flops == pytest.approx(2 * 15.47e9, rel=1e-3)
    for place, node in (("lassen", 4), ("thetagpu", 8)):
        inside, outside = images.replicated(place, node), images.replicated(place, 2 * node)
        assert inside.messages < 0.05 < outside.messages
        epochs = [images.replicated(place, each).epoch_s(each) for each in images.DEVICES]
        assert epochs == sorted(epochs, reverse=True)


def test_precision_moves_the_share_of_messages_more_than_any_other_assumption() -> None:
    told = {what: found.messages for what, found in shares()}
    base = next(iter(told.values()))
    half = [base - share for what, share in told.items() if "fp32" not in what]
    assert base - told["fp32"] > 2 * max(half)


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
