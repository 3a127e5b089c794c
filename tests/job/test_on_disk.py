"""A model built with its tensors in files has the values of a plain build, to the bit, and leaves memory free."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal.job import on_disk
from shoal.job.models.gpt import GPT, GPTConfig
from shoal.job.models.resnet import ResNet
from shoal.job.on_disk import built_on_disk, is_on_disk, to_memory


class Mixed(nn.Module):
    """What users write in `__init__`: fresh random parameters, arithmetic on them, ties, buffers, orthogonal starts."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(64, 64) * 0.02)
        self.embed = nn.Embedding(128, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embed.weight
        self.square = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        nn.init.orthogonal_(self.embed.weight)
        nn.init.trunc_normal_(self.drawn[:32], std=0.1)
        self.attention = nn.MultiheadAttention(64, 4)
        self.memory = nn.LSTM(64, 64)
        self.register_buffer("table", torch.outer(torch.arange(64.0), torch.ones(64)).sin())
        self.register_buffer("order", torch.randperm(4096), persistent=False)
        self.frozen = nn.Parameter(torch.full((64, 64), 0.5), requires_grad=False)


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "gpt": lambda: GPT(GPTConfig(layers=2, hidden=64, heads=4)),
    "llama": llama,
    "resnet": lambda: ResNet(blocks=(1, 1), widths=(16, 32), classes=10),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_and_the_random_numbers_behind_it_are_those_of_a_plain_build(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "LEAST", 1 << 12)
    monkeypatch.setattr(on_disk, "RESIDENT", 1 << 15)
    torch.manual_seed(5)
    plain, after = FAMILIES[family](), torch.rand(3)
    torch.manual_seed(5)
    model, why = built_on_disk(FAMILIES[family])
    assert torch.equal(torch.rand(3), after)
    assert not why
    assert any(is_on_disk(param) for param in model.parameters())
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(each, kind)(remove_duplicate=False)) for each in (model, plain))
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
            assert ours[name].stride() == tensor.stride(), name
            assert ours[name].requires_grad == tensor.requires_grad
    ids = [[id(p) for _, p in each.named_parameters(remove_duplicate=False)] for each in (model, plain)]
    ties = [[row.index(each) for each in row] for row in ids]
    assert ties[0] == ties[1]


def test_files_end_with_their_tensors_and_to_memory_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "LEAST", 1 << 12)
    gc.collect()
    before = len(on_disk._mapped)
    model, _ = built_on_disk(Mixed)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    to_memory(model)
    gc.collect()
    assert len(on_disk._mapped) == before
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert model.head.weight is model.embed.weight


def test_a_full_disk_leaves_the_model_in_memory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(on_disk, "LEAST", 1 << 12)
    monkeypatch.setattr(on_disk.os, "posix_fallocate", full)
    model, why = built_on_disk(Mixed)
    assert "No space left" in why
    assert not any(is_on_disk(param) for param in model.parameters())
