"""The tensor plans of models that were written elsewhere: found from their operations, not from their names."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from distributed.jobs import families, odd
from layout.parts import compare
from shoal.job.load import load_job
from shoal.layout.tensor.plan import TensorPlan
from shoal.layout.tensor.roles import own_plan, tensor_plan
from shoal.layout.tensor.text import plan_lines
from shoal.layout.trace import trace


@lru_cache
def plan(family: str) -> TensorPlan:
    return tensor_plan(trace(getattr(families, family)()))


def regions(found: TensorPlan) -> list[str]:
    return [line for line in plan_lines(found) if " -> " in line]


QKVO = "q_proj, k_proj, v_proj -> o_proj (4 times)"
GATED = "model.layers.*.mlp: features in 48 parts: gate_proj, up_proj -> down_proj (4 times)"
GROUPED = [f"model.layers.*.self_attn: heads in 2 parts: {QKVO}", GATED]
SELF = "self.query, self.key, self.value -> output.dense (4 times)"
H = "transformer.h.*"

WANTED: dict[str, list[str]] = {
    **dict.fromkeys(["llama", "llama_tied", "qwen2", "qwen3", "mistral", "gemma", "cohere"], GROUPED),
    "phi3": [
        "model.layers.*.self_attn: heads in 2 parts: qkv_proj -> o_proj (4 times)",
        "model.layers.*.mlp: features in 48 parts: gate_up_proj -> down_proj (4 times)",
    ],
    "phi": [
        "model.layers.*.self_attn: heads in 4 parts: q_proj, k_proj, v_proj -> dense (4 times)",
        "model.layers.*.mlp: features in 48 parts: fc1 -> fc2 (4 times)",
    ],
    "starcoder2": [GROUPED[0], "model.layers.*.mlp: features in 48 parts: c_fc -> c_proj (4 times)"],
    "gpt2": [
        f"{H}.attn: heads in 4 parts: c_attn -> c_proj (4 times)",
        f"{H}.mlp: features in 128 parts: c_fc -> c_proj (4 times)",
    ],
    "gptj": [
        f"{H}.attn: heads in 4 parts: q_proj, k_proj, v_proj -> out_proj (4 times)",
        f"{H}.mlp: features in 128 parts: fc_in -> fc_out (4 times)",
    ],
    "neox": [
        "gpt_neox.layers.*.attention: heads in 4 parts: query_key_value -> dense (4 times)",
        "gpt_neox.layers.*.mlp: features in 48 parts: dense_h_to_4h -> dense_4h_to_h (4 times)",
    ],
    "opt": [
        "model.decoder.layers.*.self_attn: heads in 4 parts: q_proj, k_proj, v_proj -> out_proj (4 times)",
        "model.decoder.layers.*: features in 48 parts: fc1 -> fc2 (4 times)",
    ],
    "bert": [
        f"bert.encoder.layer.*.attention: heads in 4 parts: {SELF}",
        "bert.encoder.layer.*: features in 48 parts: intermediate.dense -> output.dense (4 times)",
        "model: features in 32 parts: bert.pooler.dense -> classifier",
    ],
    "roberta": [
        f"roberta.encoder.layer.*.attention: heads in 4 parts: {SELF}",
        "roberta.encoder.layer.*: features in 48 parts: intermediate.dense -> output.dense (4 times)",
        "classifier: features in 32 parts: dense -> out_proj",
    ],
    "distilbert": [
        "distilbert.transformer.layer.*.attention: heads in 4 parts: q_lin, k_lin, v_lin -> out_lin (4 times)",
        "distilbert.transformer.layer.*.ffn: features in 48 parts: lin1 -> lin2 (4 times)",
        "model: features in 32 parts: pre_classifier -> classifier",
    ],
    "vit": [
        "vit.layers.*.attention: heads in 4 parts: q_proj, k_proj, v_proj -> o_proj (4 times)",
        "vit.layers.*.mlp: features in 48 parts: fc1 -> fc2 (4 times)",
    ],
    "bloom": [f"{H}.mlp: features in 128 parts: dense_h_to_4h -> dense_4h_to_h (4 times)"],
    "falcon": [f"{H}.mlp: features in 128 parts: dense_h_to_4h -> dense_4h_to_h (4 times)"],
    "olmo2": [GATED],
    "mixtral": [GROUPED[0]],
    "qwen3_moe": [GROUPED[0]],
    "mamba": [],
    "resnet": [
        "resnet.encoder.stages.*.layers.*.layer: channels in 8 parts: 0.convolution -> 1.convolution (2 times)",
        "resnet.encoder.stages.*.layers.*.layer: channels in 16 parts: 0.convolution -> 1.convolution (2 times)",
    ],
    "convnext": [
        "convnext.encoder.stages.*.layers.*: features in 32 parts: pwconv1 -> pwconv2 (2 times)",
        "convnext.encoder.stages.*.layers.*: features in 64 parts: pwconv1 -> pwconv2 (2 times)",
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("family", WANTED)
def test_regions_of(family: str) -> None:
    assert regions(plan(family)) == WANTED[family]


@pytest.mark.long
def test_every_projection_is_cut_or_stays_whole_for_a_reason() -> None:
    for family in WANTED:
        found = plan(family)
        cut = {path for region in found.regions for path in (*region.columns, *region.rows)}
        assert not cut & set(found.whole), family
        assert all(found.whole.values()), family


ADDED_UP = "llama gpt2 phi3 qwen3 neox opt bert gptj vit starcoder2 distilbert resnet convnext mixtral".split()


@pytest.mark.long
@pytest.mark.parametrize("family", ADDED_UP)
def test_what_ranks_compute_in_parts_adds_up_to_the_whole_of(family: str) -> None:
    job = getattr(families, family)()
    torch.manual_seed(0)
    model = job.model().double()
    batch = job.train.batch(np.arange(2))
    batch = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    for region in plan(family).regions[:2]:
        compare(model, region, 2, lambda part: job.run_model(part, batch))


WHOLE = {
    "olmo2": ("model.layers.0.self_attn.q_proj", "mean in model.layers.0.self_attn.q_norm"),
    "bloom": ("transformer.h.0.self_attention.query_key_value", "arange"),
    "falcon": ("transformer.h.0.self_attention.query_key_value", "index in transformer.h.0.self_attention"),
    "mamba": ("backbone.layers.0.mixer.in_proj", "partial sum"),
    "mixtral": ("model.layers.0.mlp.gate", "does more than project"),
    "vit": ("vit.embeddings.patch_embeddings.projection", "native_layer_norm"),
    "resnet": ("resnet.embedder.embedder.convolution", "depends on what it feeds"),
}


@pytest.mark.parametrize("family", WHOLE)
def test_what_stays_whole_says_why(family: str) -> None:
    path, words = WHOLE[family]
    assert words in plan(family).whole[path]


SCALED: dict[str, dict[str, set[str]]] = {
    "llama": {},
    "gpt2": {"attn": {"split_size"}, "attn.c_attn": {"nf"}, "mlp.c_fc": {"nf"}},
    "gptj": {"attn": {"num_attention_heads"}},
    "opt": {"self_attn": {"num_heads"}},
    "phi3": {"self_attn": {"config.num_attention_heads", "num_key_value_heads"}},
    "bert": {},
    "neox": {},
}


@pytest.mark.parametrize("family", SCALED)
def test_only_attributes_that_the_code_reads_as_sizes_are_divided(family: str) -> None:
    found: dict[str, set[str]] = {}
    for region in plan(family).regions:
        for path, name in region.scaled:
            _, _, below = path.partition(".0.")
            if below:
                found.setdefault(below, set()).add(name)
    assert found == SCALED[family]


def cut(family: str, name: str) -> tuple[int, tuple[int, ...]]:
    found = next(region.cuts[name] for region in plan(family).regions if name in region.cuts)
    return found.dim, found.segments


def test_fused_projections_are_cut_in_their_own_segments() -> None:
    assert cut("phi3", "model.layers.0.self_attn.qkv_proj.weight") == (0, (32, 16, 16))
    assert cut("phi3", "model.layers.3.mlp.gate_up_proj.weight") == (0, (48, 48))
    assert cut("gpt2", "transformer.h.0.attn.c_attn.weight") == (1, (32, 32, 32))
    assert cut("gpt2", "transformer.h.0.attn.c_attn.bias") == (0, (32, 32, 32))
    assert cut("gpt2", "transformer.h.0.attn.c_proj.weight") == (0, (32,))
    assert cut("neox", "gpt_neox.layers.0.attention.query_key_value.weight") == (0, (96,))


def test_a_rows_bias_and_a_residual_norm_are_not_cut() -> None:
    names = {name for region in plan("gpt2").regions for name in region.cuts}
    assert not any(name.endswith(("c_proj.bias", "ln_1.weight", "ln_2.bias")) for name in names)


def test_channels_carry_the_batch_norms_parameters_and_statistics() -> None:
    root = "resnet.encoder.stages.0.layers.0.layer.0.normalization"
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert cut("resnet", f"{root}.{name}") == (0, (8,))


def test_a_norm_over_each_heads_width_is_partial_and_no_other_parameter_is() -> None:
    assert plan("qwen3").regions[0].partial == (
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    )
    assert all(region.partial == () for region in plan("llama").regions)


def test_the_entry_is_where_one_tensor_feeds_all_columns() -> None:
    assert [region.entry for region in plan("llama").regions[:2]] == ["model.layers.0.self_attn", "model.layers.0.mlp"]
    assert plan("gpt2").regions[0].entry == "transformer.h.0.attn"
    assert plan("bert").regions[0].entry == "bert.encoder.layer.0.attention.self"


VOCABULARY: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "llama": (("model.embed_tokens",), ("lm_head",), True),
    "gpt2": (("transformer.wte",), ("lm_head",), True),
    "opt": (("model.decoder.embed_tokens",), ("lm_head",), True),
    "gptj": (("transformer.wte",), ("lm_head",), True),
    "bert": (("bert.embeddings.word_embeddings",), (), False),
    "roberta": (("roberta.embeddings.word_embeddings",), (), False),
}


@pytest.mark.parametrize("family", VOCABULARY)
def test_vocabulary_of(family: str) -> None:
    found = plan(family).vocabulary
    assert found is not None
    assert (found.embeddings, found.heads, found.loss_parallel) == VOCABULARY[family]
    assert all((c.dim, c.segments) == (0, (256,)) for c in found.cuts.values())


def test_a_tied_vocabulary_is_one_parameter_and_biases_are_cut_with_their_head() -> None:
    tied, untied, biased = (plan(name).vocabulary for name in ("llama_tied", "llama", "gptj"))
    names = [set(found.cuts) if found else set() for found in (tied, untied, biased)]
    assert names == [
        {"model.embed_tokens.weight"},
        {"model.embed_tokens.weight", "lm_head.weight"},
        {"transformer.wte.weight", "lm_head.weight", "lm_head.bias"},
    ]


@pytest.mark.parametrize("family", ["vit", "resnet", "convnext"])
def test_classes_are_no_vocabulary(family: str) -> None:
    assert plan(family).vocabulary is None


def test_a_sparse_embedding_is_no_vocabulary() -> None:
    assert tensor_plan(trace(odd.JOBS["sparse"]())).vocabulary is None


SEQUENCE = "llama gpt2 qwen2 qwen3 phi3 opt bert roberta distilbert vit neox gptj starcoder2 phi gemma mistral".split()


@pytest.mark.parametrize("family", SEQUENCE)
def test_tokens_may_be_cut_between_regions_of(family: str) -> None:
    assert (plan(family).sequence_dim, plan(family).why_no_sequence) == (1, "")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("olmo2", "model.layers.0.self_attn"),
        ("bloom", "bmm in transformer.h.0.self_attention"),
        ("mixtral", "model.layers.0.mlp.experts"),
        ("resnet", "no sequence of vectors"),
    ],
)
def test_tokens_stay_whole_where_a_block_mixes_them_outside_regions(family: str, words: str) -> None:
    assert plan(family).sequence_dim is None
    assert words in plan(family).why_no_sequence


def test_the_built_in_tasks_are_cut() -> None:
    language, image, residual = (tensor_plan(trace(load_job(spec))) for spec in BUILT_IN)
    assert [region.kind for region in language.regions] == ["heads", "features"] * 2
    assert language.sequence_dim == 1
    assert {region.kind for region in image.regions} == {"channels", "features"}
    assert {region.kind for region in residual.regions} == {"channels"}


BUILT_IN = ("language:tiny", "image:tiny", "image:resnet:tiny")


def test_tied_blocks_and_odd_modules_raise_nothing() -> None:
    for name in ("tied", "unused", "frozen", "buffers", "repeated", "structures", "primes", "loose", "recurrent"):
        found = tensor_plan(trace(odd.JOBS[name]()))
        assert found.regions == () or name == "primes"


def test_an_embedding_may_be_declared_whole_and_a_tied_head_stays_whole_with_it() -> None:
    found = tensor_plan(trace(families.llama_tied()), declared={"model.embed_tokens": "whole"})
    assert found.vocabulary is None
    assert regions(found) == GROUPED


def test_the_models_own_plan_is_read_with_the_paths_of_the_whole_model() -> None:
    model: Any = trace(families.llama()).model
    assert own_plan(model)["model.layers.*.self_attn.q_proj"] == "colwise"
