"""The rule of random numbers, without ranks: a draw depends on its sample and its place, and is repeated exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.job.draw_places import Places, draw_places
from shoal.job.draw_plan import Cuts
from shoal.job.random_optimizer import draws_numbers
from shoal.job.randomness import CannotPlace, Randomness

WIDTH = 6


class Own(nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x)


def ready(model: nn.Module, *, exact: bool = True, cuts: Cuts | None = None) -> Randomness:
    places = draw_places(model, lambda n: model(torch.ones(n, WIDTH)))
    randomness = Randomness(5, places, cuts, exact=exact)
    randomness.install(model)
    return randomness


def run(randomness: Randomness, model: nn.Module, samples: Sequence[int], step: int = 0) -> Tensor:
    with randomness.forward(samples, step):
        return model(torch.ones(len(samples), WIDTH))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "without a gradient": torch.no_grad()(lambda x: x * torch.rand(len(x), 1)),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, True),
    "features": lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 3), 0.5).flatten(1),
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "one number a sample": lambda x: torch.rand(len(x)),
    "randn": lambda x: torch.randn(len(x), 4),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "bernoulli of a tensor": lambda x: torch.bernoulli(x * 0.5),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "randint": lambda x: torch.randint(0, 1000, (len(x), 5)),
    "randint_like": lambda x: torch.randint_like(x, 3, 1000),
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, (len(x), 4)),
    "log-normal": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.1),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "rrelu_": lambda x: F.rrelu(-x, training=True, inplace=True),
    "multinomial": lambda x: torch.multinomial(torch.ones(len(x), 100), 3),
    "with replacement": lambda x: torch.multinomial(torch.ones(len(x), 100), 3, replacement=True),
    "categorical": lambda x: torch.distributions.Categorical(torch.ones(len(x), 4, 9)).sample(),
    "poisson": lambda x: torch.poisson(x * 40),
    "binomial": lambda x: torch.binomial((x * 60).expand(len(x), -1), torch.full_like(x, 0.3)),
    "gamma": lambda x: torch.distributions.Gamma(x * 0.4, x).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x * 0.3).rsample(),
    "beta": lambda x: torch.distributions.Beta(x, x * 2).rsample(),
    "student": lambda x: torch.distributions.StudentT(x * 3).rsample(),
    "negative binomial": lambda x: torch.distributions.NegativeBinomial(x * 9, torch.full_like(x, 0.7)).sample(),
    "gamma in a draw of several": lambda x: torch.distributions.Gamma(x, 1.0).sample((3,)).transpose(0, 1),
    "flattened": lambda x: F.dropout(x.repeat(1, 2).view(-1, WIDTH // 2), 0.5).view(len(x), -1),
    "samples second": lambda x: F.dropout(x.t(), 0.5).t(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_draws_the_same_in_any_batch_and_others_do_not(name: str) -> None:
    model = Own(DRAWS[name])
    randomness = ready(model)
    together = run(randomness, model, [0, 1, 2, 3, 4, 5])
    parts = torch.cat([run(randomness, model, [0, 1]), run(randomness, model, [2]), run(randomness, model, [3, 4, 5])])
    assert torch.equal(together, parts)
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, run(randomness, model, [6, 7, 8, 9, 10, 11], step=6))


def test_what_has_no_sample_dimension_is_drawn_once_a_step() -> None:
    model = Own(lambda x: x * torch.rand([]) + torch.rand(WIDTH))
    randomness = ready(model)
    together = run(randomness, model, range(5))
    assert torch.equal(together[:2], run(randomness, model, [3, 4]))
    assert not torch.equal(together, run(randomness, model, range(5, 10), step=5))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_models_own_checkpoint_draws_the_same_again(reentrant: bool) -> None:
    class Twice(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again = again
            self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
            nn.init.eye_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)

        def part(self, x: Tensor) -> Tensor:
            return F.dropout(self.drop(self.layer(x)), 0.3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = checkpoint(self.part, x, use_reentrant=reentrant) if self.again else self.part(x)
            return x

    model = Twice(True)
    randomness = ready(model, exact=False)
    inputs, sums = [], []
    for samples in ([0, 1, 2], [3, 4]):
        x = torch.ones(len(samples), WIDTH, requires_grad=True)
        with randomness.forward(samples, 0):
            y = model(x)
        inputs.append(x)
        sums.append(y.sum())
        slopes = y.detach()
        # The layer's bias is 0 and its weight the identity: y is x times all masks, and so is the gradient of y's sum.
        assert not torch.equal(slopes, x)
        x.expected = slopes  # type: ignore[attr-defined]
    # Two forwards under way at once, as in a pipeline.
    for total in sums:
        total.backward()
    for x in inputs:
        assert torch.equal(x.grad, x.expected)  # type: ignore[attr-defined]
    model = Twice(True)
    with pytest.raises(CannotPlace, match="own forward draws random numbers inside a checkpoint of its own"):
        run(ready(model), model, [0, 1, 2])


def test_ranks_of_tp_and_cp_take_their_parts_of_one_tensor() -> None:
    model = Own(lambda x: F.dropout(torch.ones(len(x), 8, 6), 0.5))
    places = draw_places(model, lambda n: model(torch.ones(n, WIDTH)))
    whole = Randomness(5, places, exact=True)
    whole.install(model)
    expected = run(whole, model, [3, 4])
    for cp in range(2):
        for tp in range(3):
            part = Own(lambda x: F.dropout(torch.ones(len(x), 4, 2), 0.5))
            held = np.array([[0, 1, 6, 7], [2, 3, 4, 5]][cp])
            cuts = Cuts(
                tensor=3, tensor_index=tp, context=2, context_index=cp, length=8, positions=lambda size, at=held: at
            )
            mine = Randomness(5, places, cuts, exact=True)
            mine.install(part)
            assert torch.equal(run(mine, part, [3, 4]), expected[:, held][:, :, 2 * tp : 2 * tp + 2])


def test_what_has_no_place_is_refused_in_a_proof_and_drawn_by_rank_in_training() -> None:
    def routed(x: Tensor) -> Tensor:
        return F.dropout(torch.ones(2 * len(x) + 1, 4), 0.5)

    model = Own(routed)
    with pytest.raises(CannotPlace, match=r"own forward draws random numbers of shape \[7, 4\], and how many depends"):
        run(ready(model), model, [0, 1, 2])
    model = Own(routed)
    training = ready(model, exact=False)
    assert torch.equal(run(training, model, [0, 1]), run(training, model, [0, 1]))
    assert not torch.equal(run(training, model, [0, 1]), run(training, model, [2, 3]))

    def unbounded(x: Tensor) -> Tensor:
        return torch.empty_like(x).random_()

    model = Own(unbounded)
    with pytest.raises(CannotPlace, match=r"draws random numbers by aten\.random_\.default"):
        run(ready(model), model, [0, 1, 2])
    model = Own(unbounded)
    noted = ready(model)
    noted.notes_only = True
    run(noted, model, [0, 1, 2])
    assert noted.unplaced
    assert "draws random numbers by aten.random_.default, which has no rule" in noted.unplaced[0]


def test_a_permutation_of_a_part_has_no_place() -> None:
    model = Own(lambda x: torch.randperm(8))
    places = draw_places(model, lambda n: model(torch.ones(n, WIDTH)))
    half = Own(lambda x: torch.randperm(4))
    cut = Randomness(5, places, Cuts(tensor=2, tensor_index=1), exact=True)
    cut.install(half)
    with pytest.raises(CannotPlace, match="draws a permutation of 4 elements, which are cut by tp or cp"):
        run(cut, half, [0, 1])


def test_parts_of_gamma_poisson_and_binomial_draws_are_those_of_the_full_tensor_and_dirichlet_is_refused() -> None:
    values = torch.linspace(0.1, 9.0, 8)
    for make in (torch._standard_gamma, torch.poisson, lambda v: torch.binomial(v.ceil(), v / 9)):
        model = Own(lambda x, make=make: make(values.expand(len(x), 8)))
        places = draw_places(model, lambda n, model=model: model(torch.ones(n, WIDTH)))
        full = Randomness(5, places, exact=True)
        full.install(model)
        expected = run(full, model, [3, 4])
        half = Own(lambda x, make=make: make(values[4:].expand(len(x), 4)))
        mine = Randomness(5, places, Cuts(tensor=2, tensor_index=1), exact=True)
        mine.install(half)
        assert torch.equal(run(mine, half, [3, 4]), expected[:, 4:])
    model = Own(lambda x: torch._sample_dirichlet(values.expand(len(x), 8)))
    places = draw_places(model, lambda n: model(torch.ones(n, WIDTH)))
    half = Own(lambda x: torch._sample_dirichlet(values[4:].expand(len(x), 4)))
    cut = Randomness(5, places, Cuts(tensor=2, tensor_index=1), exact=True)
    cut.install(half)
    with pytest.raises(CannotPlace, match="draws a Dirichlet sample of 4 elements, which are cut by tp or cp"):
        run(cut, half, [0, 1])


def test_gradients_of_gamma_and_dirichlet_draws_are_implicit_reparameterisations() -> None:
    concentration = torch.full((4000, 1), 2.5, dtype=torch.float64, requires_grad=True)
    model = Own(lambda x: torch.distributions.Gamma(concentration[: len(x)], 1.0).rsample())
    run(ready(model), model, range(4000)).sum().backward()
    assert concentration.grad is not None
    assert concentration.grad.mean() == pytest.approx(1.0, abs=0.05), "the mean of a gamma variable is its shape"
    weights = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    model = Own(lambda x: torch.distributions.Dirichlet(weights.expand(len(x), 3)).rsample())
    run(ready(model), model, range(4000))[:, 0].mean().backward()
    expected = torch.tensor([[5 / 36, -1 / 36, -1 / 36]], dtype=torch.float64)  # Of a_0 / sum(a).
    assert torch.allclose(weights.grad, expected, atol=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (lambda n: torch._standard_gamma(torch.full((n,), 0.2)), 0.2, 0.2),
        (lambda n: torch._standard_gamma(torch.full((n,), 0.7)), 0.7, 0.7),
        (lambda n: torch._standard_gamma(torch.full((n,), 30.0)), 30.0, 30.0),
        (lambda n: torch.poisson(torch.full((n,), 0.3)), 0.3, 0.3),
        (lambda n: torch.poisson(torch.full((n,), 5000.0)), 5000.0, 5000.0),
        (lambda n: torch.binomial(torch.full((n,), 12.0), torch.full((n,), 0.25)), 3.0, 2.25),
        (lambda n: torch._sample_dirichlet(torch.tensor([0.5, 1.5]).expand(n, 2))[:, 0], 0.25, 0.0625),
    ],
)
def test_draws_that_depend_on_values_have_their_mean_and_variance(
    draw: Callable[[int], Tensor], mean: float, variance: float
) -> None:
    num = 20_000
    model = Own(lambda x: draw(len(x)))
    drawn = run(ready(model), model, range(num)).double()
    assert float(drawn.mean()) == pytest.approx(mean, abs=4 * (variance / num) ** 0.5)
    assert float(drawn.var()) == pytest.approx(variance, rel=0.25)
    assert torch.poisson(torch.zeros(3)).eq(0).all()


def test_what_is_drawn_has_its_distribution() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0])
    model = Own(lambda x: torch.multinomial(weights.expand(len(x), 4), 1))
    drawn = run(ready(model), model, range(4000)).flatten().bincount(minlength=4)
    assert drawn[0] == drawn[3] == 0
    assert 2850 < drawn[1] < 3150
    model = Own(lambda x: torch.multinomial(weights.expand(len(x), 4), 2))
    assert all(sorted(row) == [1, 2] for row in run(ready(model), model, range(20)).tolist())
    model = Own(lambda x: F.rrelu(-x, 0.2, 0.4, training=True))
    slopes = -run(ready(model), model, range(1000))
    assert 0.2 <= slopes.min() < 0.21
    assert 0.39 < slopes.max() <= 0.4
    model = Own(lambda x: torch.empty_like(x).geometric_(0.25))
    assert run(ready(model), model, range(4000)).mean() == pytest.approx(4.0, abs=0.15)
    model = Own(lambda x: torch.empty_like(x).cauchy_(2.0, 0.5))
    assert run(ready(model), model, range(4000)).median() == pytest.approx(2.0, abs=0.05)


def test_the_slopes_of_rrelu_are_those_of_its_gradient() -> None:
    model = Own(lambda x: F.rrelu(-x, training=True))
    x = torch.ones(3, WIDTH, requires_grad=True)
    with ready(model).forward([0, 1, 2], 0):
        y = model(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_a_module_that_begins_to_draw_later_is_refused_in_a_proof() -> None:
    class Late(nn.Module):
        begun = False

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5) if self.begun else x

    model = Late()
    randomness = ready(model)
    run(randomness, model, [0, 1, 2])
    model.begun = True
    with pytest.raises(CannotPlace, match="a module that drew no random numbers when the model was called on a few"):
        run(randomness, model, [0, 1, 2])


def test_draws_of_python_and_numpy_are_seeded_by_the_step_in_training_too() -> None:
    model = Own(lambda x: x * random.random() * np.random.rand())
    drawn = draw_places(model, lambda n: model(torch.ones(n, WIDTH)))
    one, two = (Randomness(5, replace(drawn, other_generators=True)) for _ in range(2))
    assert torch.equal(run(one, model, [0, 1]), run(two, model, [2, 3]))
    assert not torch.equal(run(one, model, [4, 5], step=4), run(two, model, [2, 3]))


def test_models_that_draw_nothing_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
    assert draw_places(model, lambda n: model(torch.ones(n, WIDTH))) == Places({}, frozenset(), False)
    ready(model, exact=False)
    assert all("forward" not in vars(module) for module in model.modules())


def test_optimisers_that_draw_are_told_from_those_that_do_not() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param += torch.randn(param.shape, generator=torch.Generator().manual_seed(1))

    assert draws_numbers(lambda groups: Noisy(groups, lr=0.1))
    for plain in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        assert not draws_numbers(lambda groups, plain=plain: plain(groups, lr=0.1))
