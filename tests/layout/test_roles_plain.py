"""What lies between two projections decides whether they may be cut; and what is cut gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layout import plain_models as plain
from layout.parts import compare
from shoal.job import Job
from shoal.layout.layout import facts_of, layout_of
from shoal.layout.tensor.plan import TensorPlan
from shoal.layout.tensor.roles import InvalidRole, tensor_plan
from shoal.layout.trace import trace
from shoal.strategy import parse


def plan_of(model: Callable[[], nn.Module], data: Any = None, **options: Any) -> TensorPlan:
    return tensor_plan(trace(plain.job_of(model, data)), **options)


def degrees(parts: int) -> list[int]:
    return [n for n in range(2, parts + 1) if parts % n == 0][:3]


@pytest.mark.parametrize("case", plain.GOOD)
def test_parts_add_up_to_the_whole(case: str) -> None:
    wide, narrow, code, parts = plain.GOOD[case]
    job = plain.job_of(plain.between(wide, narrow, code))
    (region,) = tensor_plan(trace(job)).regions
    assert (region.columns, region.rows, region.parts) == (("up",), ("down",), parts)
    torch.manual_seed(0)
    model, x = job.model().double(), torch.randn(3, plain.TOKENS, plain.WIDTH, dtype=torch.float64)
    for ranks in degrees(parts):
        compare(model, region, ranks, lambda part: part(x))


@pytest.mark.parametrize("case", plain.BAD)
def test_code_that_mixes_parts_leaves_both_projections_whole(case: str) -> None:
    wide, narrow, code, word = plain.BAD[case]
    plan = plan_of(plain.between(wide, narrow, code))
    assert plan.regions == ()
    assert word in plan.whole["up"]


def test_attributes_that_the_code_reads_as_sizes_are_found_and_no_others() -> None:
    scaled = {}
    for case in ("halves by a size", "query, key, value in chunks", "halves by chunk", "few key heads"):
        wide, narrow, code, _ = plain.GOOD[case]
        scaled[case] = plan_of(plain.between(wide, narrow, code)).regions[0].scaled
    assert scaled["halves by a size"] == (("", "half"),)
    assert scaled["query, key, value in chunks"] == (("", "heads"),)
    assert scaled["halves by chunk"] == ()
    assert scaled["few key heads"] == (("", "heads"),)


def test_a_replay_leaves_the_model_as_it_was() -> None:
    job = plain.job_of(plain.between(36, 12, plain.chunks_then_heads))
    recorded = trace(job, model=job.model())
    before = {name: (id(p), tuple(p.shape)) for name, p in recorded.model.named_parameters()}
    heads = recorded.model.heads
    tensor_plan(recorded)
    assert {name: (id(p), tuple(p.shape)) for name, p in recorded.model.named_parameters()} == before
    assert recorded.model.heads == heads


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_librarys_encoder_is_cut_by_heads_and_features(batch_first: bool) -> None:
    plan = plan_of(lambda: plain.Encoder(batch_first=batch_first))
    assert [(r.kind, r.parts, r.columns, r.rows) for r in plan.regions] == [
        entry
        for n in (0, 1)
        for entry in (
            ("heads", 4, (f"encoder.layers.{n}.self_attn",), (f"encoder.layers.{n}.self_attn.out_proj",)),
            ("features", 24, (f"encoder.layers.{n}.linear1",), (f"encoder.layers.{n}.linear2",)),
        )
    ]
    cut = plan.regions[0].cuts["encoder.layers.0.self_attn.in_proj_weight"]
    assert (cut.dim, cut.segments) == (0, (12, 12, 12))
    assert plan.sequence_dim == (1 if batch_first else 0)


def test_tokens_stay_whole_where_the_stream_is_read_after_the_last_block() -> None:
    plan = plan_of(lambda: plain.Stack(skip=True))
    assert (plan.sequence_dim, len(plan.regions)) == (None, 2)
    assert "read again after the last block" in plan.why_no_sequence
    assert plan_of(lambda: plain.Stack(skip=False)).sequence_dim == 1


def test_a_block_that_is_applied_again_and_again_is_one_region() -> None:
    (region,) = plan_of(plain.Repeated).regions
    assert (region.columns, region.rows) == (("block.0.up",), ("block.0.down",))


def test_a_layer_that_would_be_cut_in_one_call_only_stays_whole() -> None:
    plan = plan_of(plain.OneInTwoRoles)
    assert plan.regions == ()
    assert set(plan.whole) == {"up", "mid", "down"}


def test_parameters_between_are_cut_along_or_named_as_partial() -> None:
    (region,) = plan_of(plain.Gains).regions
    assert region.parts == 4
    assert region.partial == ("in_head",)
    assert {name: (cut.dim, cut.segments) for name, cut in region.cuts.items()} == {
        "gain": (0, (24,)),
        "slope": (0, (4,)),
        "up.weight": (0, (24,)),
        "up.bias": (0, (24,)),
        "down.weight": (1, (24,)),
    }


def test_a_parameter_whose_gradient_would_be_half_partial_forbids_the_region() -> None:
    plan = plan_of(lambda: plain.Gains(read_outside=True))
    assert plan.regions == ()
    assert "in_head" in plan.whole["up"]


def test_an_activation_that_enters_whole_forbids_the_region() -> None:
    plan = plan_of(plain.Leaking)
    assert plan.regions == ()
    assert "partial sum" in plan.whole["query"]


def test_groups_of_channels_are_dealt_out_whole_and_their_number_divided() -> None:
    (region,) = plan_of(plain.Gated, plain.pictures()).regions
    assert (region.kind, region.parts, region.columns, region.rows) == ("channels", 4, ("first",), ("last",))
    assert set(region.scaled) == {("norm", "num_groups"), ("groups", "groups")}
    assert (region.cuts["groups.weight"].dim, region.cuts["groups.weight"].segments) == (0, (16,))


def test_parts_of_convolutions_by_groups_add_up() -> None:
    job = plain.job_of(plain.Gated, plain.pictures())
    (region,) = tensor_plan(trace(job)).regions
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    for ranks in (2, 4):
        compare(job.model().double(), region, ranks, lambda part: part(x))


def pairs(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_chain_of_convolutions_is_cut_in_pairs() -> None:
    layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)]
    layers += [nn.MaxPool2d(2), nn.Conv2d(4, 3, 1)]
    plan = plan_of(pairs(*layers), plain.pictures())
    assert [(r.columns, r.rows, r.parts) for r in plan.regions] == [(("0",), ("3",), 8), (("5",), ("7",), 4)]
    assert {"1.weight", "1.bias", "1.running_mean", "1.running_var"} < set(plan.regions[0].cuts)


def test_an_odd_layer_stays_whole() -> None:
    model = lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    recorded = trace(plain.job_of(lambda: nn.Sequential(nn.Flatten(0, 1), model(), nn.Unflatten(0, (-1, 5)), Last())))
    plan = tensor_plan(recorded)
    assert [(r.columns, r.rows) for r in plan.regions] == [(("1.0",), ("1.2",))]
    assert list(plan.whole) == ["1.4"]


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def test_what_the_job_declares_whole_stays_whole() -> None:
    plan = plan_of(plain.between(24, 24, lambda self, x: x.relu()), declared={"do*": "whole"})
    assert plan.regions == ()
    assert plan.whole["down"] == "the job declares it"


def test_declared_roles_that_hold_are_taken() -> None:
    model = plain.between(24, 24, lambda self, x: x.relu())
    assert plan_of(model, declared={"up": "column", "down": "row"}).regions == plan_of(model).regions


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"up": "row"}, "up is declared a row"),
        ({"down": "column"}, "output"),
        ({"nothing.*": "row"}, "matches no projection"),
        ({"up": "diagonal"}, "column, row, whole"),
    ],
)
def test_declared_roles_that_do_not_hold_are_refused_with_the_reason(declared: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRole, match=words):
        plan_of(plain.between(24, 24, lambda self, x: x.relu()), declared=declared)


def test_a_declared_column_that_the_code_refutes_is_refused_with_the_operation() -> None:
    wide, narrow, code, _ = plain.BAD["a norm over all"]
    with pytest.raises(InvalidRole, match="native_layer_norm"):
        plan_of(plain.between(wide, narrow, code), declared={"up": "column"})


def test_a_model_without_projections_has_an_empty_plan() -> None:
    plan = plan_of(lambda: nn.Sequential(Last(), nn.LayerNorm(12)))
    assert plan == TensorPlan(regions=(), why_no_sequence=plan.why_no_sequence)


def test_a_single_layer_stays_whole() -> None:
    job: Job = plain.job_of(lambda: nn.Sequential(Last(), nn.Linear(12, 3)))
    assert list(tensor_plan(trace(job)).whole) == ["1"]


def test_a_refusal_names_the_model_itself_where_its_root_holds_the_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.ones(plain.WIDTH, 16)), nn.Parameter(torch.ones(16, plain.CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ self.up).relu() @ self.down).mean(1)

    job = plain.job_of(Net)
    why = facts_of(job, layout_of(job, parse("tp(2)"))).tensor_why
    assert why == "the model itself (class Net): it does more than project (relu)"


def test_a_refusal_gives_the_reason_of_the_largest_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(plain.WIDTH, plain.WIDTH), nn.Linear(plain.WIDTH, 3 * plain.WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(self.small(x).softmax(-1)).unflatten(-1, (plain.CLASSES, -1)).softmax(-1).mean((1, 3))

    job = plain.job_of(Net)
    assert facts_of(job, layout_of(job, parse("tp(2)"))).tensor_why.startswith("large: ")
