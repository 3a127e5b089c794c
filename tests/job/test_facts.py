"""Facts read off a model: what they say, and that what the user declares wins."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from shoal.job import infer_facts, load_job
from shoal.job.facts import has_dropout
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.models.vgg import VGG
from shoal.job.tasks.language import language
from shoal.strategy.facts import ModelFacts


def test_facts_of_the_language_task() -> None:
    facts = infer_facts(load_job("language"))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.hidden, facts.vocab, facts.sequence) == (
        2,
        4,
        4,
        32,
        256,
        32,
    )
    assert (facts.tied, facts.dropout, facts.batch_norm, facts.channels, facts.image, facts.experts) == (
        False,
        False,
        None,
        None,
        None,
        0,
    )
    assert (facts.clips, facts.elementwise_optimizer, facts.token_weighted, facts.global_batch) == (
        True,
        True,
        False,
        24,
    )


def test_facts_of_the_image_task() -> None:
    facts = infer_facts(load_job("image"))
    assert facts.channels == (8, 8, 16, 16)
    assert facts.image == (14, 14)
    assert facts.batch_norm == "sync"
    assert facts.heads is None
    assert facts.sequence is None
    assert facts.layers == 6
    assert infer_facts(replace(load_job("image"), batch_norm="local", clip=None)).batch_norm == "local"


def test_uneven_token_counts_are_noticed() -> None:
    assert infer_facts(language(ignore_fraction=0.3)).token_weighted is True


def test_tied_weights_are_noticed_also_on_the_meta_device() -> None:
    job = load_job("language")
    tied = replace(job, model=partial(GPT, GPTConfig(layers=2, heads=4, hidden=32, sequence=32, tied=True)))
    assert infer_facts(tied).tied is True
    torch.manual_seed(0)
    assert infer_facts(job, model=tied.model()).tied is True


def test_dropout_is_noticed_only_where_it_drops() -> None:
    small = partial(VGG, stages=((1, 4),), fully_connected=(8,), classes=10, image=14)
    assert has_dropout(small(dropout=0.1))
    assert not has_dropout(small())
    assert not has_dropout(nn.Dropout(0.0))
    assert has_dropout(nn.MultiheadAttention(8, 2, dropout=0.1))


def test_heads_are_read_off_torchs_own_attention() -> None:
    job = load_job("language")
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 6, dropout=0.0), num_layers=3)
    facts = infer_facts(job, model=model)
    assert (facts.heads, facts.layers) == (6, 3)


def test_what_the_job_declares_wins() -> None:
    job = replace(load_job("language"), facts=ModelFacts(heads=12, experts=8, dropout=True))
    facts = infer_facts(job)
    assert (facts.heads, facts.experts, facts.dropout, facts.layers) == (12, 8, True, 2)


def test_a_constructor_that_reads_values_is_built_for_real() -> None:
    class ReadsValues(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.scale = float(self.weight.abs().sum())

    assert infer_facts(replace(load_job("image"), model=ReadsValues)).layers == 1


def test_inferring_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    infer_facts(load_job("image"))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("name", "layers"), [("gpt2-medium", 24), ("vgg16", 16), ("resnet50", 54)])
def test_facts_of_the_real_shapes_cost_no_memory(name: str, layers: int) -> None:
    assert infer_facts(load_job(name)).layers == layers
