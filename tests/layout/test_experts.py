"""Experts are found by how they are called: alternatives are told from chains, and finding leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.jobs import moe, moe_layers
from shoal.layout.experts.find import ExpertLayer, find_experts, survey_experts

WIDTH = moe_layers.WIDTH


def vectors() -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))


def found(model: nn.Module, given: Tensor | None = None) -> list[ExpertLayer]:
    given = vectors() if given is None else given
    return find_experts(model, lambda: model(given))


class Mixture(nn.Module):
    """A soft mixture of whatever experts it is given; `ask` says how each is called."""

    def __init__(self, experts: list[nn.Module], ask: Callable[[Any, nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, len(experts))
        self.experts = nn.ModuleList(experts)
        self.ask = ask or (lambda self, expert, x: expert(x))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        return sum(self.ask(self, e, x) * scores[..., n, None] for n, e in enumerate(self.experts))  # type: ignore[return-value]


class Chain(nn.Module):
    """Layers one after the other, and a head whose classes are as many as the layers."""

    def __init__(self, layers: int = 3, *, residual: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, layers)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x)) if self.residual else layer(x)
        return self.head(x)


class Branches(nn.Module):
    """Several heads of one input, among which nobody chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def linears(number: int = 3) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(number)]


@pytest.mark.parametrize("make", [moe.by_hand, moe.six, moe.capacity, moe.soft])
def test_listed_experts_are_found_with_their_owner_and_parameters(make: Callable[[], Any]) -> None:
    model = make().model()
    layers = found(model, torch.randint(0, moe.VOCAB, (2, 5)))
    assert [layer.path for layer in layers] == ["blocks.0.mixture.experts", "blocks.1.mixture.experts"]
    for layer in layers:
        assert layer.form == "listed"
        assert layer.owner == layer.path.removesuffix(".experts")
        assert layer.count == len(layer.members) == len(model.get_submodule(layer.path))
        assert layer.width == layer.result_width == moe.WIDTH
        assert set(layer.parameter_names) == {n for n, _ in model.named_parameters() if n.startswith(layer.path)}


@pytest.mark.parametrize("model", [Chain(), Chain(residual=True), Branches(), nn.Linear(WIDTH, 2), nn.ModuleList()])
def test_chains_branches_and_plain_models_have_no_experts(model: nn.Module) -> None:
    survey = survey_experts(model, lambda: model(vectors()) if not isinstance(model, nn.ModuleList) else None)
    assert survey.layers == ()
    assert survey.passed_over == ()


def test_a_chain_of_mixtures_has_the_mixtures_experts_and_not_the_chain() -> None:
    model = nn.Sequential(Mixture(linears()), nn.ModuleList([Mixture(linears(2)), Mixture(linears(2))])[0], nn.Tanh())
    assert [(layer.path, layer.count) for layer in found(model)] == [("0.experts", 3), ("1.experts", 2)]


def test_two_lists_of_one_owner_are_found_in_the_order_of_their_calls() -> None:
    layers = found(moe_layers.Pairs())
    assert [(layer.path, layer.owner, layer.width, layer.result_width) for layer in layers] == [
        ("first", "", 6, 5),
        ("second", "", 5, 6),
    ]


def test_an_awkward_layer_is_found_though_it_changes_what_it_is_given() -> None:
    (layer,) = found(moe_layers.Awkward())
    assert (layer.path, layer.count, layer.width, layer.result_width) == ("experts", 4, 6, 4)


def test_experts_within_experts_stay_with_the_outer_ones() -> None:
    model = Mixture([Mixture(linears()), Mixture(linears())])
    assert [layer.path for layer in found(model)] == ["experts"]


def test_experts_of_whole_sequences_are_found_too() -> None:
    (layer,) = found(Mixture(linears()), vectors().view(3, 4, WIDTH))
    assert layer.count == 3


def test_one_expert_called_is_enough_to_find_all() -> None:
    model = moe_layers.Awkward().double()
    with torch.no_grad():
        model.gate.bias[2] = 1e6
    assert [layer.count for layer in found(model, vectors().double())] == [4]


def test_stacked_experts_are_found_and_the_attribute_that_counts_them_told_from_a_width() -> None:
    (layer,) = found(moe_layers.Stacked())
    assert (layer.path, layer.form, layer.count, layer.owner) == ("experts", "stacked", WIDTH, "experts")
    assert layer.parameter_names == ("experts.up", "experts.bias", "experts.down")
    # hidden_size equals the number of experts as well, and is read by the code.
    assert layer.count_names == ("how_many",)


def test_stacked_experts_with_a_hook_on_a_gradient_are_passed_over() -> None:
    model = moe_layers.Stacked()
    name, param = next((name, param) for name, param in model.named_parameters() if param.dim() == 3)
    param.register_hook(lambda gradient: 0.5 * gradient)
    (passed,) = survey_experts(model, lambda: model(torch.randn(6, moe_layers.WIDTH))).passed_over
    assert passed.reason.endswith(f"a hook on the gradient of {name} would see the part of some experts only")


def test_stacked_experts_that_do_not_add_up_are_passed_over_in_words() -> None:
    model = moe_layers.Stacked()
    forward = model.experts.forward
    model.experts.forward = lambda *a, **k: torch.tanh(forward(*a, **k))  # type: ignore[method-assign]
    survey = survey_experts(model, lambda: model(vectors()))
    assert survey.layers == ()
    assert [each.reason for each in survey.passed_over] == [
        "experts: the results of its experts for a token do not add up slot by slot"
    ]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-1, -2)).softmax(-1) @ self.lin(x)


class WithFlag(nn.Linear):
    def forward(self, x: Tensor, flag: bool = True) -> Tensor:  # type: ignore[override]
        return super().forward(x) if flag else x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixture([Attention() for _ in range(2)]), "does not treat rows of tokens one by one"),
        (
            Mixture([nn.Sequential(*linears(1), nn.BatchNorm1d(WIDTH)) for _ in range(2)]),
            "does not treat rows of tokens one by one",
        ),
        (
            Mixture([WithFlag(WIDTH, WIDTH) for _ in range(2)], lambda self, expert, x: expert(x, True)),
            "call them as expert(tokens)",
        ),
    ],
    ids=["attention", "batch norm", "flag"],
)
def test_what_looks_like_experts_and_cannot_be_dealt_out_is_passed_over_with_its_name(
    model: nn.Module, reason: str
) -> None:
    survey = survey_experts(model, lambda: model(vectors()))
    assert survey.layers == ()
    (passed,) = survey.passed_over
    assert passed.path == "experts"
    assert passed.reason.startswith("experts: ")
    assert reason in passed.reason


def test_experts_called_past_their_list_are_passed_over() -> None:
    model = Mixture(linears())
    real = tuple(model.experts)
    places = iter(range(10**6))
    model.ask = lambda self, expert, x: real[next(places) % 3](x)
    survey = survey_experts(model, lambda: model(vectors()))
    assert survey.layers == ()
    assert "called from elsewhere" in survey.passed_over[0].reason


def test_experts_that_share_a_parameter_are_passed_over() -> None:
    experts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    experts[1].bias = experts[0].bias
    model = Mixture(list(experts))
    survey = survey_experts(model, lambda: model(vectors()))
    assert survey.layers == ()
    assert "experts.0.bias is used elsewhere" in survey.passed_over[0].reason


def state(model: nn.Module) -> dict[str, Any]:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    own = [{k: copy.copy(v) for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()]
    return {
        "hooks": hooks,
        "own": own,
        "random": torch.get_rng_state().tolist(),
        "modes": [m.training for m in model.modules()],
    }


@pytest.mark.parametrize("training", [True, False])
def test_finding_leaves_the_model_and_the_random_numbers_as_they_were(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), moe_layers.Awkward())
    model.train(training)
    before, values = state(model), copy.deepcopy(model.state_dict())
    assert len(found(model)) == 1
    assert state(model) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name


def test_hooks_are_gone_also_when_the_run_fails() -> None:
    model = Mixture(linears())
    with pytest.raises(RuntimeError, match="shapes"):
        found(model, torch.zeros(2, WIDTH + 1))
    assert state(model)["hooks"] == 0


def test_a_model_without_lists_or_stacks_is_not_even_run() -> None:
    def never() -> None:
        raise AssertionError("it was run")

    assert find_experts(nn.Tanh(), never) == []


FAMILIES = ["Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "Olmoe", "Llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_a_librarys_families_are_found_without_knowing_them(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16,
        intermediate_size=12,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=32,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        pad_token_id=0,
        decoder_sparse_step=1,
    )
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    layers = found(model, torch.randint(3, 30, (2, 6)))
    if family == "Llama":
        assert layers == []
        return
    assert [layer.path for layer in layers] == [f"model.layers.{n}.mlp.experts" for n in range(2)]
    assert {(layer.form, layer.count, layer.count_names) for layer in layers} == {("stacked", 4, ("num_experts",))}
