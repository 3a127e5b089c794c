"""Hugging Face configurations as jobs: the right kind of model, the library's own loss, and data that fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from shoal.job import JobError, TensorData, from_transformers, infer_facts  # noqa: E402
from shoal.job.huggingface import choose_kind  # noqa: E402
from shoal.job.losses import IGNORED  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 32,
}


def config(kind: str, **changes: Any) -> Any:
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=96,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
            **changes,
        )
    if kind == "opt":
        return transformers.OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=96,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
            **changes,
        )
    if kind == "vit":
        small = {key: value for key, value in SMALL.items() if key not in ("vocab_size", "max_position_embeddings")}
        return transformers.ViTConfig(**small, image_size=28, patch_size=7, num_channels=1, num_labels=10, **changes)
    if kind == "bert":
        return transformers.BertConfig(**SMALL, num_labels=3, **changes)
    if kind == "mixtral":
        return transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, **changes)
    if kind == "qwen2":
        return transformers.Qwen2Config(**SMALL, num_key_value_heads=2, **changes)
    assert kind == "llama"
    return transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **changes)


EVERY = ["llama", "gpt2", "qwen2", "opt", "mixtral", "bert", "vit"]


def build(job: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = job.model().double()
    batch = job.train.batch(np.array([0, 3, 500, 7]))
    return model, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("kind", EVERY)
def test_forward_loss_and_backward_reach_every_parameter(kind: str) -> None:
    job = from_transformers(config(kind), dropout=0.0)
    model, batch = build(job)
    total, count = job.loss(job.run_model(model, batch), batch)
    total.backward()
    assert torch.isfinite(total)
    assert int(count) == batch["y"].numel()
    assert all(parameter.grad is not None for parameter in model.parameters())
    values = job.summarise(
        {name: (float(s), float(n)) for name, (s, n) in job.measure(job.run_model(model, batch), batch).items()}
    )
    assert set(values) == ({"loss", "perplexity"} if kind not in ("bert", "vit") else {"loss", "accuracy"})


@pytest.mark.parametrize("kind", EVERY)
def test_the_loss_over_its_count_is_the_librarys_mean(kind: str) -> None:
    job = from_transformers(config(kind), dropout=0.0)
    model, batch = build(job)
    if kind in ("bert", "vit"):
        theirs = model(**{"pixel_values" if kind == "vit" else "input_ids": batch["x"]}, labels=batch["y"]).loss
    else:
        batch["y"][:, -1] = IGNORED  # the library shifts within the window, and so has no target for its last place
        batch["y"][1, 2:9] = IGNORED
        labels = torch.cat([batch["x"][:, :1], batch["y"][:, :-1]], dim=1)
        theirs = model(input_ids=batch["x"], labels=labels).loss
    total, count = job.loss(job.run_model(model, batch), batch)
    # The library computes the loss of a language model in float32.
    assert float(total / count) == pytest.approx(float(theirs), rel=1e-6)


def test_data_in_the_librarys_own_names_are_shifted_here() -> None:
    tokens = torch.randint(96, (6, 12))
    mask = torch.ones_like(tokens)
    mask[:, 9:] = 0
    labels = tokens.masked_fill(mask == 0, IGNORED)
    data = TensorData(input_ids=tokens, attention_mask=mask, labels=labels)
    job = from_transformers(config("llama"), data=data)
    torch.manual_seed(0)
    model, batch = job.model(), data.batch(np.arange(6))
    total, count = job.loss(job.run_model(model, batch), batch)
    theirs = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    assert int(count) == 6 * 8
    assert float(total / count) == pytest.approx(float(theirs), rel=1e-5)
    assert job.validation is None


def test_data_without_inputs_or_targets_are_refused_with_what_they_hold() -> None:
    with pytest.raises(JobError, match=r"'input_ids' or 'x'.*\['tokens'\]"):
        from_transformers(config("llama"), data=TensorData(tokens=torch.zeros(2, 4, dtype=torch.int64)))
    with pytest.raises(JobError, match=r"'y' or 'labels'.*\['x'\]"):
        from_transformers(config("vit"), data=TensorData(x=torch.zeros(2, 1, 28, 28)))
    with pytest.raises(JobError, match="sequence"):
        from_transformers(config("llama"), data=TensorData(input_ids=torch.zeros(2, 4, dtype=torch.int64)), sequence=4)


@pytest.mark.parametrize(
    ("kind", "changes", "task", "expected"),
    [
        ("llama", {}, None, "causal-lm"),
        ("gpt2", {}, None, "causal-lm"),
        ("bert", {}, None, "text-classifier"),
        ("vit", {}, None, "image-classifier"),
        ("gpt2", {}, "classifier", "text-classifier"),
        ("bert", {}, "causal-lm", "causal-lm"),
        ("bert", {"is_decoder": True}, None, "causal-lm"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, None, "text-classifier"),
    ],
)
def test_the_kind_follows_the_configuration_unless_told_otherwise(
    kind: str, changes: dict, task: Any, expected: str
) -> None:
    assert choose_kind(config(kind, **changes), task) == expected


def test_a_classifier_on_a_decoder_trains() -> None:
    job = from_transformers(config("gpt2", num_labels=5), task="classifier", sequence=16)
    model, batch = build(job)
    total, count = job.loss(job.run_model(model, batch), batch)
    total.backward()
    assert int(count) == 4
    assert int(batch["y"].max()) < 5


def test_what_cannot_become_a_job_is_refused() -> None:
    with pytest.raises(JobError, match="encoder-decoder"):
        from_transformers(transformers.T5Config())
    with pytest.raises(JobError, match="cannot become a causal-lm"):
        from_transformers(config("vit"), task="causal-lm")
    with pytest.raises(JobError, match="unknown task 'translate'"):
        from_transformers(config("llama"), task="translate")  # type: ignore[arg-type]
    with pytest.raises(JobError, match="got a dict"):
        from_transformers({"hidden_size": 3})


def test_facts_come_from_the_configuration() -> None:
    facts = infer_facts(from_transformers(config("llama")))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.hidden, facts.vocab, facts.sequence) == (
        2,
        4,
        2,
        32,
        96,
        32,
    )
    assert (facts.tied, facts.experts, facts.dropout) == (False, 0, False)
    assert infer_facts(from_transformers(config("gpt2"))).tied is True
    assert infer_facts(from_transformers(config("gpt2"))).dropout is True
    assert infer_facts(from_transformers(config("gpt2"), dropout=0.0)).dropout is False
    assert infer_facts(from_transformers(config("mixtral"))).experts == 4
    assert infer_facts(from_transformers(config("vit"))).image == (28, 28)


def test_tied_weights_stay_tied_and_are_stepped_once() -> None:
    from shoal.job import param_groups

    job = from_transformers(config("gpt2"))
    model = job.model()
    assert model.lm_head.weight is model.transformer.wte.weight
    stepped = [id(p) for group in param_groups(model, job.options) for p in group["params"]]
    assert len(stepped) == len(set(stepped))


def test_the_users_configuration_is_not_changed_and_models_are_float32() -> None:
    mine = config("gpt2", dtype="bfloat16")
    before = mine.to_dict()
    job = from_transformers(mine, dropout=0.0)
    assert {parameter.dtype for parameter in job.model().parameters()} == {torch.float32}
    assert mine.to_dict() == before


def test_two_models_from_one_seed_are_equal() -> None:
    job = from_transformers(config("llama"))
    first, second = build(job)[0], build(job)[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
