"""Whether samples are independent is found out by computing, and what is wrong with a loss is said by name."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from distributed.jobs import coupled, odd
from shoal.job import JobError
from shoal.proof.coupling import Coupling, couples_samples, refusal
from shoal.strategy import IllegalStrategy, contract, parse, require_legal
from shoal.strategy.facts import ModelFacts


def found(name: str) -> Coupling:
    return couples_samples(coupled.JOBS[name]())


@pytest.mark.parametrize("name", ["plain", "functional", "complex", "from_numpy", "numpy_data"])
def test_independent_samples_are_found_independent(name: str) -> None:
    row = found(name)
    assert row.kind == "none", row.reason
    assert row.difference < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(odd.JOBS))
def test_no_odd_job_raises_a_false_alarm(name: str) -> None:
    row = couples_samples(odd.JOBS[name]())
    assert row.kind == "none", row.reason


@pytest.mark.parametrize("name", ["info_nce", "info_nce_dropout", "clip"])
def test_a_loss_that_couples_samples_is_named(name: str) -> None:
    row = found(name)
    assert row.kind == "coupled"
    assert "the loss couples samples and does not add up: of 8 samples it is" in row.reason
    assert 'Declare Job(loss_over="batch")' in row.reason


@pytest.mark.parametrize("name", ["centred", "centred_dropout", "hand_norm", "gated", "balanced"])
def test_a_model_that_couples_samples_is_named_also_behind_a_zero_gate(name: str) -> None:
    row = found(name)
    assert row.kind == "coupled"
    assert "the model couples samples (output" in row.reason


def test_batch_norm_that_engines_synchronise_is_left_out() -> None:
    class ByFunction(coupled.Plain):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, None, None, training=True)

    by_function = couples_samples(coupled.make(ByFunction))
    assert by_function.kind == "none", by_function.reason
    assert by_function.state == ("statistics of batch_norm()",)
    norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False, affine=False)]
    model = partial(nn.Sequential, nn.Linear(6, 6), *norms, nn.Linear(6, 6))
    assert couples_samples(coupled.make(model)).kind == "none"


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("mean", "mean", "the loss is a mean, not a sum: of 8 samples it is"),
        (
            "wrong_count",
            "count",
            "the count is wrong: of 8 samples it is 1, of 2 and 6 of them 1 and 1, which does not",
        ),
        ("weighted", "count-gradient", "the count requires a gradient: the gradient of sum / count then has a part"),
        ("padded", "padding", "what a sample computes depends on which samples are read with it (padding to the"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(name: str, kind: str, sentence: str) -> None:
    row = found(name)
    assert row.kind == kind, row.reason
    assert sentence in row.reason


def test_a_mean_times_the_samples_is_no_sum_over_tokens() -> None:
    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        weight = 1.0 + batch["y"]  # As many tokens as the label says.
        losses = nn.functional.cross_entropy(output, batch["y"], reduction="none")
        return (losses * weight).sum() / weight.sum() * len(weight), len(weight)

    row = couples_samples(coupled.make(coupled.Plain, loss=loss))
    assert row.kind == "count"
    assert "the count is not what the loss is a sum over" in row.reason


def hardest(output: torch.Tensor, batch: dict[str, torch.Tensor], *, at_least: int) -> tuple[torch.Tensor, int]:
    losses = nn.functional.cross_entropy(output, batch["y"], reduction="none")
    kept = losses.topk(min(at_least, len(losses))).values
    return kept.sum(), len(kept)


def test_hard_examples_that_are_kept_up_to_a_number_are_found_in_the_full_batch() -> None:
    row = couples_samples(coupled.make(coupled.Plain, loss=partial(hardest, at_least=9)))
    assert row.kind == "coupled"
    assert "the loss couples samples and does not add up: of 12 samples it is" in row.reason
    few = coupled.make(coupled.Plain, loss=partial(hardest, at_least=9), global_batch=8)
    assert couples_samples(few).kind == "none"
    assert couples_samples(coupled.make(coupled.Plain, loss=partial(hardest, at_least=9)), within_s=0.0).kind == "none"


def test_draws_of_python_and_numpy_are_alike_in_all_parts_of_a_step() -> None:
    """Training seeds both once per step, so each rank draws what one process draws."""

    class Coin(coupled.Plain):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + random.random()) * (1 + np.random.rand())

    class PerSample(coupled.Plain):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.from_numpy(np.random.rand(len(x), 1))

    states = random.getstate(), np.random.get_state()[1].tolist()
    assert couples_samples(coupled.make(Coin)).kind == "none"
    assert couples_samples(coupled.make(PerSample)).kind == "coupled"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_random_numbers_in_backward_are_named() -> None:
    class Noisy(coupled.Plain):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * (1 + 0.1 * torch.rand_like(gradient)))
            return x

    row = couples_samples(coupled.make(Noisy))
    assert row.kind == "random"
    assert "backward draws random numbers (a gradient hook or" in row.reason


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ((torch.ones(3), 3), "loss returns a tensor of shape [3] as its sum, but must return one number there"),
        ((torch.ones(()), torch.ones(3)), "loss returns a tensor of shape [3] as its count, but must return one"),
        ((torch.ones(()), None), "loss returns a NoneType as its count, but must return one number there"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(found: tuple[object, object], sentence: str) -> None:
    job = coupled.make(coupled.Plain, loss=lambda output, batch: found)
    with pytest.raises(JobError) as refused:
        job.loss_of(torch.ones(3), {})
    assert sentence in str(refused.value)


@pytest.mark.parametrize("count", [3, 3.0, True, np.int64(3), np.float32(3), torch.tensor([3]), np.array(3)])
def test_one_number_in_any_form_is_a_count(count: object) -> None:
    job = coupled.make(coupled.Plain, loss=lambda output, batch: (output.sum().reshape(1), count))
    total, counted = job.loss_of(torch.ones(3), {})
    assert total.shape == ()
    assert float(counted) == float(count)  # type: ignore[arg-type]


def test_two_reads_that_differ_are_named() -> None:
    class Augmented(coupled.FromNumpyData):
        def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
            batch = super().batch(indices)
            return {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}

    row = couples_samples(coupled.make(coupled.Plain, train=Augmented()))
    assert row.kind == "data"
    assert "two reads of the same samples differ" in row.reason


def test_outputs_for_a_loss_over_the_batch_must_be_those_of_each_sample() -> None:
    assert found("info_nce_batch").kind == found("clip_batch").kind == "none"
    row = found("centred_batch")
    assert row.kind == "coupled"
    assert "gathers the model's outputs, and they are not those of each sample alone (output 0" in row.reason


def test_state_that_a_forward_changes_is_named() -> None:
    assert found("counting").state == ("level",)
    assert found("plain").state == ()


def test_only_strategies_that_split_the_batch_are_refused() -> None:
    row = found("centred")
    for text in ("dp(2)", "accumulate(2)", 'pp(2, "1f1b", micro=4)', "dp(3, zero=3)"):
        assert refusal(row, parse(text)).startswith(
            f"{parse(text)} splits the batch, but job 'coupled': the model couples"
        )
    assert refusal(row, parse("tp(2)")) == refusal(row, parse('pp(2, "gpipe", micro=1)')) == ""
    assert refusal(found("weighted"), parse("tp(2)")) != ""


def test_the_check_leaves_model_and_random_state_alone() -> None:
    job = coupled.JOBS["counting"]()
    model = job.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    couples_samples(job, model=model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(param.dtype == torch.float32 and param.grad is None for param in model.parameters())


def test_a_loss_over_the_batch_is_refused_where_outputs_cannot_be_gathered() -> None:
    facts = ModelFacts(loss_over="batch")
    for text, reason in (
        ("accumulate(2)", "of which each micro-batch has only a part; leave it out, or declare"),
        ('pp(2, "1f1b", micro=4)', "of which each micro-batch has only a part; use micro=1, or declare"),
        ("cp(2)", "outputs are gathered over its samples, not over parts of a sequence"),
    ):
        with pytest.raises(IllegalStrategy, match="the loss is one of the global batch") as refused:
            require_legal(parse(text), facts=facts)
        assert reason in str(refused.value)
    require_legal(parse("dp(2, zero=3)"), facts=facts)
    with pytest.raises(IllegalStrategy, match="batch norm is synchronised over all of them"):
        require_legal(parse("dp(2)"), facts=ModelFacts(loss_over="micro-batch", batch_norm="sync"))


def test_a_contract_per_micro_batch_says_so() -> None:
    strategy = parse("dp(2) * accumulate(3)")
    plain = contract(strategy, ModelFacts())
    assert (plain.micro_batches, plain.parts) == (1, 1)
    declared = contract(strategy, ModelFacts(loss_over="micro-batch"))
    assert (declared.micro_batches, declared.parts) == (3, 2)
    assert any(reason.startswith("per micro-batch: the job declares") for reason in declared.reasons)
    stateful = contract(strategy, ModelFacts(forward_state=("level",)))
    assert (stateful.micro_batches, stateful.parts) == (3, 1)
    assert any(reason.startswith("per micro-batch: every forward changes level") for reason in stateful.reasons)


def test_losses_and_metrics_that_are_no_pairs_get_a_sentence() -> None:
    job = coupled.JOBS["plain"]()
    bare = replace(job, loss=lambda output, batch: output.mean())
    with pytest.raises(JobError, match=r"loss is the number .* but must be a pair \(sum, count\)"):
        couples_samples(bare)
    batch = job.train.batch(np.arange(2))
    output = job.run_model(job.model(), batch)
    with pytest.raises(JobError, match=r"metric 'accuracy' is 0.5, but must be a pair \(sum, count\)"):
        replace(job, metrics=lambda output, batch: {"accuracy": 0.5}).measure(output, batch)
    with pytest.raises(JobError, match="metric 'accuracy' is the number"):
        replace(job, metrics=lambda output, batch: {"accuracy": torch.tensor(0.5)}).measure(output, batch)
    with pytest.raises(JobError, match=r"metrics returned 0\.5, but must return a dictionary"):
        replace(job, metrics=lambda output, batch: 0.5).measure(output, batch)


def test_an_unknown_loss_over_is_refused() -> None:
    with pytest.raises(JobError, match="loss_over is 'batches', but must be 'samples', 'batch' or 'micro-batch'"):
        coupled.make(coupled.Plain, loss_over="batches")


def test_noise_is_drawn_by_each_sample_for_itself() -> None:
    row = found("noisy")
    assert (row.kind, row.reason) == ("none", "")


def hardest_half(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    each = nn.functional.cross_entropy(output, batch["y"], reduction="none")
    kept = each.topk(max(1, len(each) // 2))[0]
    return kept.sum(), len(kept)


@pytest.mark.parametrize("seed", range(6))
def test_a_loss_that_selects_samples_is_found_whatever_their_order(seed: int) -> None:
    row = couples_samples(replace(coupled.make(coupled.Plain, loss=hardest_half), seed=seed))
    assert row.kind == "coupled", row.reason


class Later(coupled.Plain):
    """Couples samples from its eleventh call on."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.calls = 0
        if buffer:
            del self.calls
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = super().features(x)
        return x - x.mean(0) if self.calls > 10 else x


@pytest.mark.parametrize("buffer", [False, True])
def test_a_coupling_that_begins_later_is_found(buffer: bool) -> None:
    row = couples_samples(coupled.make(partial(Later, buffer)))
    assert row.kind == "coupled"
    assert "(found where calls is 20)" in row.reason


def neighbours(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    pairs = output[: len(output) // 2 * 2].unflatten(0, (-1, 2))
    return (1 - pairs[:, 0] + pairs[:, 1]).relu().sum(), len(pairs)


def test_a_loss_over_neighbours_is_refused_only_where_shares_part_them() -> None:
    job = coupled.make(coupled.Plain, loss=neighbours)
    whole = couples_samples(job, strategy=parse("dp(3)"))
    assert whole.kind == "none"
    assert whole.ordered  # So a proof does not read samples in reverse to measure rounding.
    assert couples_samples(job, strategy=parse("dp(4)")).kind == "coupled"


def test_state_of_private_attributes_and_frozen_parameters_counts() -> None:
    class Held(coupled.Plain):
        def __init__(self) -> None:
            super().__init__()
            self._seen: list[int] = []
            self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

        def mix(self, x: torch.Tensor) -> torch.Tensor:
            self._seen.append(1)
            self.frozen.data.add_(1)
            return x

    assert couples_samples(coupled.make(Held)).state == ("_seen", "frozen")


class Ghosts(coupled.Plain):
    """Batch norm of four samples at a time, or of all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.norm = size, nn.BatchNorm1d(coupled.WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(part) for part in x.split(self.size)])


def test_batch_norm_of_groups_of_samples_is_named_where_replicas_would_share_it() -> None:
    job = coupled.make(partial(Ghosts, 4))
    reason = couples_samples(job, strategy=parse("dp(2)")).reason
    assert "the batch norm norm normalises groups of samples that do not grow with the batch" in reason
    assert refusal(couples_samples(job, strategy=parse("dp(2)")), parse("dp(2)"))
    for other, strategy in ((job, "accumulate(2)"), (replace(job, batch_norm="local"), "dp(2)")):
        assert couples_samples(other, strategy=parse(strategy)).kind == "none"
    assert couples_samples(coupled.make(partial(Ghosts, 100)), strategy=parse("dp(2)")).kind == "none"


class Copied(coupled.Plain):
    """A teacher that starts as its student and follows it, from some call on."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.after, self.calls = after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training and self.calls > self.after:
            with torch.no_grad():
                for mine, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
        h = self.features(x)
        return self.head(h) - self.teacher(h).detach()


@pytest.mark.parametrize("after", [0, 10])
def test_a_teacher_that_starts_as_a_copy_of_its_student_is_state_that_micro_batches_move(after: int) -> None:
    assert couples_samples(coupled.make(partial(Copied, after))).state == ("calls", "teacher.bias", "teacher.weight")


def test_a_backward_that_is_not_linear_is_named_with_its_parameter() -> None:
    """Under any strategy: gradients are those of a sum, and a script's those of a mean."""

    class Hooked(coupled.Plain):
        def __init__(self) -> None:
            super().__init__()
            next(self.parameters()).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    row = couples_samples(coupled.make(Hooked))
    assert row.kind == "backward"
    name = next(name for name, _ in Hooked().named_parameters())
    assert f"for an eighth of the loss the gradient of {name} is not an eighth of what it was (a hook" in row.reason
    assert refusal(row, parse("tp(2)")) == row.reason


def test_a_backward_written_by_hand_that_normalises_is_named() -> None:
    class Normalises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / gradient.norm(dim=-1, keepdim=True)

    class Inside(coupled.Plain):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            return Normalises.apply(x)

    assert couples_samples(coupled.make(Inside)).kind == "backward"
    mean = couples_samples(coupled.make(Inside, loss=coupled.mean_loss))
    assert mean.kind == "backward"
    assert refusal(mean, parse("tp(2)")) == ""  # Divided by 1, as in a script.
    assert refusal(mean, parse("dp(2)")) == mean.reason


def test_a_gradient_that_is_zero_but_for_rounding_is_no_alarm() -> None:
    """Cox's loss does not change if all risks do by the same, and its backward takes logarithms of gradients."""

    def cox(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        risk = output[:, 0]
        return (risk.logcumsumexp(0) - risk).sum(), len(risk)

    for seed in range(4):
        assert couples_samples(replace(coupled.make(coupled.Plain, loss=cox), seed=seed)).kind == "coupled"


def test_hooks_that_scale_are_no_alarm() -> None:
    class Hooked(coupled.Plain):
        def __init__(self) -> None:
            super().__init__()
            next(self.parameters()).register_hook(lambda gradient: 0.1 * gradient)

    assert couples_samples(coupled.make(Hooked)).kind == "none"
