"""Replicated models: what is slower in the world is slower here."""

from __future__ import annotations

import pytest
from benchmarks.replicated import WORKS, predict_replicated, work_of

ROW = {
    "model": "resnet50 v1.5",
    "gpu": "V100 SXM2 16GB",
    "gpus": "8",
    "gpus_per_node": "8",
    "intra_gb_s": "150",
    "inter_gb_s": "1.5",
    "batch_per_gpu": "128",
    "accumulate": "1",
    "precision": "fp16",
    "seq": "",
    "framework": "PyTorch",
}


def step(**changed: str) -> float:
    ((step_s, reason),) = predict_replicated([ROW | changed])
    assert step_s, reason
    return step_s


def test_resnet_on_one_v100_is_as_fast_as_people_measure() -> None:
    assert 128 / step(gpus="1") == pytest.approx(800, rel=0.25)


def test_wider_numbers_more_nodes_and_larger_batches_take_longer() -> None:
    assert step(precision="fp32") > 1.5 * step()
    assert step(gpus="32") > step()
    assert step(batch_per_gpu="256") > 1.8 * step()
    assert step(gpu="A100 SXM4 80GB") < step()


def test_frameworks_that_fuse_are_faster() -> None:
    assert step(framework="OneFlow") < step(framework="NGC MXNet") < step(framework="MXNet")


def test_a_model_that_is_not_known_is_refused_with_those_that_are() -> None:
    ((step_s, reason),) = predict_replicated([ROW | {"model": "deep thought"}])
    assert step_s is None
    assert "'deep thought' is not known" in reason


def test_gpunet_is_no_unet() -> None:
    assert work_of("GPUNet-0", batch=1, length=0, framework="") is WORKS["gpunet-0"]
