"""Networks that hold all candidates: which samples give which gradient, what is learned, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from torch import nn

from shoal.job import Job, JobError, TensorData, load_job
from shoal.job.groups import param_groups
from shoal.job.one_shot import HELD, Both, MixedChoice, OneShotNet, one_shot, proportions
from shoal.job.space import MIXED, load_space, point
from shoal.searching.proposal import MixingTrial, job_of
from shoal.searching.shared_weights import Chosen

LINE = f"{Path(__file__).with_name('line_space.py')}:space"
POINT = {"lr": 0.1, "momentum": 0.5, "hidden": 4, "between": MIXED}


def squared(output, batch):
    return ((output - batch["y"]) ** 2).sum(), len(output)


def two_matrices(samples: int = 12) -> Job:
    """A mixture of two matrices, and nothing else."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, generator=draw, dtype=torch.float64)
    data = TensorData(x=x, y=torch.randn(samples, 2, generator=draw, dtype=torch.float64))
    choices = {"a": lambda: nn.Linear(3, 2, bias=False).double(), "b": lambda: nn.Linear(3, 2, bias=False).double()}
    return Job(
        name="two",
        model=lambda: MixedChoice("layer", choices),
        train=data,
        validation=data,
        loss=squared,
        global_batch=4,
        steps=10,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )


def test_one_half_gives_the_gradient_of_the_weights_and_the_other_that_of_the_shares():
    plain = two_matrices()
    job = one_shot(plain)
    torch.manual_seed(0)
    model = job.model()
    assert isinstance(model, OneShotNet)
    first, second = (each.weight for each in model.net.candidates)
    shares = model.net.architecture
    with torch.no_grad():
        shares.copy_(torch.tensor([0.3, -0.4], dtype=torch.float64))
    indices = np.array([1, 3, 4])
    batch = job.train.batch(indices)
    loss, count = job.loss_of(job.run_model(model, batch), batch)
    loss.backward()
    # By hand: the even samples are for the weights, the odd ones for the shares.
    rows = plain.train.tensors
    p = torch.exp(torch.tensor([0.3, -0.4], dtype=torch.float64))
    p = p / p.sum()
    w1, w2 = first.detach(), second.detach()
    own_x, own_y = rows["x"][2 * indices], rows["y"][2 * indices]
    off = 2 * (p[0] * own_x @ w1.T + p[1] * own_x @ w2.T - own_y)
    held_x, held_y = rows["x"][2 * indices + 1], rows["y"][2 * indices + 1]
    held_off = 2 * (p[0] * held_x @ w1.T + p[1] * held_x @ w2.T - held_y)
    d = torch.stack([(held_off * (held_x @ w1.T)).sum(), (held_off * (held_x @ w2.T)).sum()])
    torch.testing.assert_close(first.grad, p[0] * off.T @ own_x)
    torch.testing.assert_close(second.grad, p[1] * off.T @ own_x)
    torch.testing.assert_close(shares.grad.double(), p * (d - (p * d).sum()), rtol=1e-6, atol=1e-6)
    assert count == 3
    assert len(job.train) == len(plain.train) // 2


def test_in_evaluation_it_is_the_plain_network():
    job = one_shot(two_matrices())
    model = job.model().eval()
    batch = job.validation.batch(np.arange(12))
    output = job.run_model(model, batch)
    assert not isinstance(output, Both)
    torch.testing.assert_close(output, model.net(batch["x"]))
    assert job.measure(output, batch)["loss"][1] == 12
    assert f"x{HELD}" in batch


def test_the_better_candidate_gains_the_larger_share():
    x = torch.linspace(-2, 2, 64)[:, None]
    data = TensorData(x=x, y=x.abs())
    choices = {"identity": nn.Identity, "relu": nn.ReLU, "tanh": nn.Tanh}
    job = one_shot(
        Job(
            name="abs",
            model=lambda: nn.Sequential(nn.Linear(1, 16), MixedChoice("between", choices), nn.Linear(16, 1)),
            train=data,
            loss=squared,
            global_batch=16,
            steps=150,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05),
        )
    )
    torch.manual_seed(0)
    model, order, counter = job.model(), job.order(), 0
    optimizer = job.optimizer(param_groups(model, job.options))
    for _ in range(job.steps):
        batch = job.train.batch(order.indices(counter))
        counter = order.next(counter)
        loss, count = job.loss_of(job.run_model(model, batch), batch)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
    [shares] = proportions(model).values()
    assert max(shares, key=shares.__getitem__) == "relu"
    assert shares["relu"] > 0.5


def test_a_point_with_a_star_is_a_network_of_mixtures():
    job = load_job(point(LINE, POINT))
    assert job.name == "line:one-shot"
    assert [name for name, _ in job.model().named_parameters() if "architecture" in name] == ["net.1.architecture"]
    optimizer = job.optimizer(param_groups(job.model(), job.options))
    assert [type(each).__name__ for each in optimizer.inner] == ["SGD", "Adam"]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1, 5.0 / 16}


def test_candidates_of_different_shapes_and_losses_over_batches_are_refused():
    mixture = MixedChoice("layer", {"a": lambda: nn.Linear(2, 3), "b": lambda: nn.Linear(2, 4)})
    with pytest.raises(JobError, match=r"'layer' cannot be mixed: they return a \[1, 3\], b \[1, 4\]"):
        mixture(torch.ones(1, 2))
    with pytest.raises(JobError, match="needs a loss over samples"):
        one_shot(replace(two_matrices(), loss_over="batch"))


def test_modules_are_chosen_and_the_rest_is_drawn():
    study = optuna.create_study()
    found = []
    for place in range(2):
        study.sampler = sampler = Chosen(seed=place, place=place)
        trial = study.ask()
        mixing = MixingTrial(trial)
        job_of(load_space(LINE), mixing)
        assert mixing.mixed[:1] == ["between"]
        assert mixing.values["between"] == MIXED
        sampler.modules = {"between": "relu"}
        assert trial.suggest_categorical("between", ("tanh", "relu")) == "relu"
        found.append(mixing.drawn)
        study.tell(trial, 1.0)
    assert found[0]["hidden"] == 5  # The middle first.
    assert found[0]["lr"] == pytest.approx(0.0316, rel=1e-2)
    assert found[1] != found[0]
