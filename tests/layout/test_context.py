"""Where context parallelism may cut a sequence: what is cut along with it, and what forbids it, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData, cross_entropy
from shoal.layout.context.find import context_plan
from shoal.layout.context.plan import CannotCutSequence, ContextPlan, Holder
from shoal.layout.layout import layout_of
from shoal.layout.trace import trace
from shoal.strategy import parse

WIDTH, HEADS, LENGTH, VOCABULARY = 8, 2, 12, 11


def plan_of(model: Callable[[], nn.Module], *, pooled: bool = False, loss: Any = cross_entropy) -> ContextPlan:
    """The plan of a model of tokens; `pooled`: it answers once for a whole sample."""
    x = torch.randint(0, VOCABULARY, (6, LENGTH))
    y = torch.randint(0, VOCABULARY, (6,) if pooled else (6, LENGTH))
    job = Job(
        name="small",
        model=model,
        train=TensorData(x=x, y=y),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=6,
        steps=1,
    )
    return context_plan(trace(job))


class Block(nn.Module):
    """Attention and a layer; subclasses depart from it in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = True) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_decoder_is_cut_from_its_first_block_to_the_loss() -> None:
    plan = plan_of(Model)
    assert (plan.length, plan.dim, plan.stream, plan.causal) == (LENGTH, 1, 0, True)
    assert plan.blocks == ("blocks.0", "blocks.1")
    assert plan.batch == {"y": 1}, "the loss reads its targets position by position"
    assert not plan.extras
    assert not plan.masks


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (lambda o, b: (F.cross_entropy(o.flatten(0, 1), b["y"].flatten(), reduction="sum") / o.shape[1], 6), "count"),
        (lambda o, b: (cross_entropy(o, b)[0] / o.shape[1], b["y"].numel()), "the loss of all positions is"),
        (lambda o, b: (cross_entropy(o, b)[0], 6 * LENGTH), "the count of all positions is 72"),
    ],
)
def test_a_loss_that_reads_the_length_from_a_shape_gets_the_whole_sequence(loss: Any, wrong: str) -> None:
    x = torch.randint(0, VOCABULARY, (6, LENGTH))
    job = Job(
        name="by-length",
        model=Model,
        train=TensorData(x=x, y=x),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        global_batch=6,
        steps=1,
    )
    plan = layout_of(job, parse("cp(2)")).context
    assert plan is not None
    assert plan.batch is None
    assert wrong in plan.why_whole
    by_position = layout_of(replace(job, loss=cross_entropy), parse("cp(2)")).context
    assert by_position is not None
    assert by_position.batch == {"y": 1}


def test_attention_to_both_sides_is_not_causal() -> None:
    class Both(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.attend(x, causal=False)

    assert plan_of(partial(Model, Both)).causal is False


def test_a_pooled_answer_needs_the_whole_sequence_behind_the_blocks() -> None:
    class Pooled(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(1))

    plan = plan_of(Pooled, pooled=True)
    assert plan.batch is None
    assert plan.why_whole


def test_what_blocks_are_given_for_each_position_is_cut_along() -> None:
    class Turned(Block):
        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            return x + self.attend(x * angles.cos())

    class Rotary(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            angles = torch.arange(LENGTH, dtype=torch.float32)[None, :, None] * torch.ones(WIDTH)
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, angles)
            return self.head(x)

    plan = plan_of(partial(Rotary, Turned))
    assert plan.extras == {"blocks.0": {1: 1}, "blocks.1": {1: 1}}


def test_a_mask_of_positions_by_positions_is_found() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x + self.attend(x, mask)

    class WithMask(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, mask=mask)
            return self.head(x)

    plan = plan_of(partial(WithMask, Masked))
    assert plan.masks == {"blocks.0": (1,), "blocks.1": (1,)}
    assert plan.causal


class OwnPositions(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x + self.table(torch.arange(x.shape[1])))


class OwnMask(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())


class LearnedTable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x + self.bias)


class Convolved(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Averaged(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x - x.mean(1, keepdim=True))


class Shifted(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(torch.cat([x[:, 1:], x[:, :1]], dim=1))


class Summed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x.cumsum(1))


@pytest.mark.parametrize("block", [OwnPositions, OwnMask, LearnedTable])
def test_a_block_that_makes_tables_for_its_attention_runs_as_if_it_had_all_positions(block: type[nn.Module]) -> None:
    plan = plan_of(partial(Model, block))
    assert list(plan.holders) == ["blocks.0", "blocks.1"]
    assert plan.holders["blocks.0"] == Holder(arguments={0: (1, 1)}, results={0: (1, 1)})


@pytest.mark.parametrize("block", [Convolved, Averaged, Shifted, Summed])
def test_a_block_that_needs_all_positions_is_refused_by_name(block: type[nn.Module]) -> None:
    with pytest.raises(CannotCutSequence, match=r"blocks\.0") as refusal:
        plan_of(partial(Model, block))
    assert len(str(refusal.value)) > len("blocks.0 ") + 10


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(CannotCutSequence, match=r"no attention was found: no product in blocks\.0"):
        plan_of(partial(Model, partial(nn.Linear, WIDTH, WIDTH)))


class ByHand(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.mT, -1) @ v)


class Remembering(ByHand):
    """Writes into one position of the scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        scores[:, 0] = 0.0
        return x + self.out(torch.softmax(scores, -1) @ v)


def test_attention_written_by_hand_is_found_by_what_it_computes() -> None:
    plan = plan_of(partial(Model, ByHand))
    assert list(plan.holders) == ["blocks.0", "blocks.1"]
    assert plan.batch == {"y": 1}
    assert not plan.causal


def test_writing_into_a_position_of_the_scores_is_refused_by_name() -> None:
    with pytest.raises(CannotCutSequence, match=r"blocks\.0 .* writes into positions of the sequence, in place"):
        plan_of(partial(Model, Remembering))


def test_a_mask_that_hides_padding_is_not_causal() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + self.attend(x, mask)

    class Padded(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, (tokens != 0)[:, None, None])
            return self.head(x)

    assert plan_of(partial(Padded, Masked)).causal is False


class Outside(Model):
    """Attends outside the blocks."""

    def __init__(self) -> None:
        super().__init__(partial(nn.Linear, WIDTH, WIDTH))
        self.last = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


class Twice(Model):
    """Runs a block several times."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number in (0, 1, 0):
            x = self.blocks[number](x)
        return self.head(x)


class Beside(Model):
    """Uses the stream beside the first block."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


@pytest.mark.parametrize("model", [Outside, Twice, Beside])
def test_a_model_that_works_on_the_sequence_itself_runs_as_if_it_had_all_positions(model: type[nn.Module]) -> None:
    plan = plan_of(model)
    assert plan.in_root
    assert plan.holders == {"": Holder(arguments={0: (1, 1)}, results={0: (1, 1)})}
    assert plan.batch == {"y": 1}


def test_what_one_sample_has_no_positions_for_is_cut_at_the_first_block() -> None:
    class Folded(Twice):
        """Its argument holds two positions in each entry."""

        def forward(self, tokens: Tensor) -> Tensor:
            first = x = self.embed(tokens.view(len(tokens), -1, 2)).sum(2)
            for block in self.blocks:
                x = block(x)
            return self.head((x + first).mean(1))

    plan = plan_of(Folded, pooled=True)
    assert (plan.blocks, plan.length, plan.batch) == (("blocks.0",), LENGTH // 2, None)


class Telling(Block):
    """Gives back something for each position beside the stream."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x + self.attend(x), x.square().sum(-1)


class Priced(Model):
    """Adds up what its blocks tell, for each position."""

    pooled = False

    def __init__(self) -> None:
        super().__init__(Telling)

    def forward(self, tokens: Tensor) -> Tensor:
        x, told = self.embed(tokens), []
        for block in self.blocks:
            x, price = block(x)
            told.append(price)
        price = torch.stack(told).sum(0)[..., None]
        return self.head(x.mean(1)) + price.mean(1) if self.pooled else self.head(x) + price


class PooledAndPriced(Priced):
    pooled = True


def test_what_blocks_tell_of_each_position_may_reach_a_loss_by_position() -> None:
    assert plan_of(Priced).batch == {"y": 1}


def test_what_blocks_tell_of_each_position_is_gathered_with_the_stream() -> None:
    plan = plan_of(PooledAndPriced, pooled=True)
    assert plan.in_root
    assert plan.batch is None


def each_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss of each position."""
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="none")


def masked_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    counts = (batch["x"] % 3 == 0).flatten()
    return (each_of(output, batch) * counts).sum(), counts.sum()


def hardest_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return each_of(output, batch).view_as(batch["y"]).amax(1).sum(), len(output)


def test_what_a_loss_of_each_position_is_multiplied_by_is_cut_along() -> None:
    assert plan_of(Model, loss=masked_loss).batch == {"y": 1, "x": 1}


def test_a_loss_that_compares_positions_needs_all_of_them() -> None:
    plan = plan_of(Model, loss=hardest_loss)
    assert plan.batch is None
    assert "amax" in plan.why_whole
