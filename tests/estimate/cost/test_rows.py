"""Rows with gaps, other conventions of counting, and every kind of device: predicted, finite and plausible."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.estimate.cost import gathered, inputs_from_rows, price, read_rows

ROW = {
    "layers": "80",
    "hidden": "8192",
    "heads": "64",
    "kv_heads": "8",
    "ffn": "28672",
    "gated": "1",
    "seq": "4096",
    "vocab": "128256",
    "gpu": "H100 SXM5 80GB",
    "gpus": "256",
    "gpus_per_node": "8",
    "tp": "4",
    "pp": "4",
    "dp": "16",
    "micro_batch": "1",
    "global_batch": "512",
    "precision": "bf16",
    "framework": "NeMo",
    "zero": "1",
    "sequence": "1",
    "schedule": "interleaved",
    "chunks": "5",
}
DENSE = 2 * 8192 * 8192 * (1 + 1 / 8) + 3 * 8192 * 28672
FLOPS = 6 * (80 * DENSE + 128256 * 8192)


def step_s(**changed: str) -> float:
    read = read_rows([ROW | changed])
    return float(price(read.inputs, gathered(read.profiles, read.profile_index)).step_s[0])


def utilisation(**changed: str) -> float:
    row = ROW | changed
    inputs = inputs_from_rows([row])
    flops = FLOPS * float(row["seq"]) * float(row["global_batch"]) / float(row["gpus"])
    return flops / (step_s(**changed) * float(inputs.peak_flops[0]))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"framework": "MaxText"},
        {"framework": "nobody"},
        {"gpu": "H200"},
        {"gpu": "B200"},
        {"gpu": "GB200", "gpus_per_node": "4"},
        {"gpu": "A100-SXM4-80GB", "framework": "Megatron-LM"},
        {"gpu": "MI300X", "framework": "Primus"},
        {"tp": "1", "pp": "1", "dp": "256", "zero": "3", "framework": "PyTorch FSDP", "schedule": "", "chunks": "1"},
        {"tp": "1", "pp": "1", "dp": "256", "zero": "3", "framework": "torchtitan compile", "recompute": "full"},
        {"schedule": "zbv", "chunks": "1"},
        {"cp": "2", "dp": "8"},
    ],
)
def test_a_large_dense_model_uses_a_plausible_part_of_its_device(changed: dict[str, str]) -> None:
    assert 0.25 < utilisation(**changed) < 0.6


def test_fp8_gains_as_much_as_its_products_weigh() -> None:
    assert 1.15 < step_s() / step_s(precision="fp8") < 1.7
    assert step_s(gpu="A100", precision="FP8") == step_s(gpu="A100")


def test_tensor_parallelism_over_nodes_is_slower_but_not_absurd() -> None:
    within, across = (step_s(tp=tp, pp="4", dp=dp) for tp, dp in (("8", "8"), ("16", "4")))
    assert 1.1 < across / within < 3


def test_experts_cost_more_than_their_products_and_less_than_an_order() -> None:
    sparse = {
        "experts": "128",
        "active_experts": "8",
        "ffn": "1536",
        "hidden": "4096",
        "tp": "1",
        "pp": "4",
        "dp": "64",
        "ep": "8",
    }
    dense = sparse | {"experts": "0", "active_experts": "0", "ffn": str(8 * 1536), "ep": "1"}
    assert 1.1 < step_s(**sparse) / step_s(**dense) < 4
    assert step_s(**sparse | {"ep": "64"}) > step_s(**sparse)


def test_gaps_are_filled_and_other_ways_of_counting_understood() -> None:
    assert step_s(dp="") == step_s(dp="2") == step_s()
    assert step_s(heads="", kv_heads="") == step_s(heads="64", kv_heads="64")
    assert step_s(micro_batch="") == step_s(micro_batch="1")
    # More expert ranks than there are replicas: folded over tp.
    assert np.isfinite(step_s(experts="128", active_experts="8", ffn="1536", ep="64"))


def test_half_a_module_is_a_device_where_a_node_has_eight() -> None:
    node = {"gpu": "MI250X (whole OAM = 2 GCDs)", "framework": "Megatron-DeepSpeed"}
    halves, wholes = (inputs_from_rows([ROW | node | {"gpus_per_node": count}]) for count in ("8", "4"))
    assert halves.peak_flops[0] == pytest.approx(wholes.peak_flops[0] / 2)
