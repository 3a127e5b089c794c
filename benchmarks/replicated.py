"""Step times of models that are only replicated (images, detection, BERT), from a short table of what each one
computes, held to a file of published throughputs:

    python benchmarks/replicated.py ROWS.csv

It is a model of eleven networks with constants of their own, fitted on the rows it is held to (`fit_replicated.py`):
good to see what replication costs in the world, and to compare with (`comparison_images.py`); no part of the planner.

A step is accumulated micro-batches, each the longer of device and host, then what gradients could not hide, then the
optimiser. The device multiplies at a part of its peak that depends on kind and precision, and moves activations through
memory as often as the framework's kernels are unfused. Written over columns, as all prices are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shoal.api.validate import read_measurements
from shoal.cli.validate import print_scores
from shoal.cluster import BadCluster, device
from shoal.estimate.cost.constants import PHYSICS
from shoal.estimate.validate import Prediction, score

Row = Mapping[str, str]
G, M = 1e9, 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one sample costs in forward, and how large the model is."""

    flops: float
    """Two for each multiplication and addition."""
    numbers: float
    """Outputs of all layers, in numbers: what memory-bound operations read and write."""
    parameters: float
    layers: float
    """Launches in forward, about: convolutions with norm and activation, or blocks times their operations."""
    kind: str = "conv"


def _bert(layers: int, hidden: int, length: int) -> Work:
    """An encoder: linear layers, the full square of attention, and what lies in between (Korthikanti et al. 2022)."""
    block = 12 * hidden * hidden
    flops = length * (2 * layers * block + 4 * layers * length * hidden + 2 * hidden * hidden)
    heads = hidden // 64
    numbers = length * layers * (17 * hidden + 2.5 * heads * length)
    return Work(
        flops=flops, numbers=numbers, parameters=layers * block + 31_000 * hidden, layers=layers * 14, kind="encoder"
    )


# Counted from the architectures: multiplications of every convolution at the input size that the benchmark uses.
WORKS: dict[str, Work] = {
    "resnet50": Work(flops=8.2 * G, numbers=11.1 * M, parameters=25.6 * M, layers=160),
    "resnext101-32x4d": Work(flops=16.0 * G, numbers=21.3 * M, parameters=44.2 * M, layers=320, kind="grouped"),
    "ssd300-resnet50": Work(flops=41 * G, numbers=30 * M, parameters=21 * M, layers=150),
    "ssd320-fpn": Work(flops=45 * G, numbers=34 * M, parameters=33 * M, layers=600),
    "mask-rcnn": Work(flops=520 * G, numbers=260 * M, parameters=44 * M, layers=700),
    "unet-2d": Work(flops=301 * G, numbers=134 * M, parameters=31 * M, layers=70),
    "unet-industrial": Work(flops=60 * G, numbers=80 * M, parameters=1.9 * M, layers=70),
    "unet-3d": Work(flops=970 * G, numbers=520 * M, parameters=18 * M, layers=70, kind="volume"),
    "nnunet-2d": Work(flops=11 * G, numbers=13 * M, parameters=20 * M, layers=90),
    "nnunet-3d": Work(flops=950 * G, numbers=500 * M, parameters=31 * M, layers=80, kind="volume"),
    "gpunet-0": Work(flops=6.5 * G, numbers=17 * M, parameters=11.9 * M, layers=150, kind="grouped"),
}
KINDS = ("conv", "grouped", "volume", "encoder")
PRECISIONS = ("fp32", "tf32", "fp16")


def work_of(model: str, *, batch: float, length: float, framework: str) -> Work:
    """The work of a model by the name that benchmarks give it."""
    name = model.lower().replace("_", "-").replace(" ", "-")
    if "bert" in name:
        # Without a length a row is of fine-tuning: 384 for SQuAD (BERT), 128 for named entities (BioBERT).
        base = "bio" in name or "base" in name
        used = int(length) if length else (128 if base else 384)
        return _bert(12, 768, used) if base else _bert(24, 1024, used)
    if "nnunet" in name:
        return WORKS["nnunet-3d" if batch < 16 else "nnunet-2d"]
    if name.startswith("ssd"):
        return WORKS["ssd320-fpn" if framework.lower().startswith("tensorflow") else "ssd300-resnet50"]
    for sign, key in (
        ("resnext", "resnext101-32x4d"),
        ("resnet", "resnet50"),
        ("mask", "mask-rcnn"),
        ("unet-3d", "unet-3d"),
        ("unet-industrial", "unet-industrial"),
        ("gpunet", "gpunet-0"),
        ("unet", "unet-2d"),
    ):
        if sign in name:
            return WORKS[key]
    raise ValueError(f"the work of model {model!r} is not known; known are bert, {', '.join(WORKS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Fitted on NVIDIA's DeepLearningExamples, OneFlow's DLPerf and MLPerf (`benchmarks/fit_replicated.py`)."""

    conv_fp16: float = 0.53
    """Part of the datasheet's peak that convolutions reach, by precision (above 1 in fp32: Winograd saves products)."""
    conv_tf32: float = 0.59
    conv_fp32: float = 1.2
    grouped: float = 0.82
    """Of that, with grouped and separable convolutions."""
    volume: float = 0.63
    """Of that, in three dimensions in 16 bits."""
    volume_fp32: float = 0.42
    """The same in 32 bits."""
    gemm_fp16: float = 0.63
    gemm_tf32: float = 0.66
    gemm_fp32: float = 0.77
    passes: float = 24
    """Reads and writes of each layer's output, forward and backward, where nothing is fused."""
    encoder_passes: float = 5.2
    launch_s: float = 12e-6
    """The host's time for one launch; backward has two for each of forward."""
    step_s: float = 0.0025
    sync_s: float = 0.0017
    """Once a step where there are several devices: they wait for the slowest."""
    hidden: float = 0.6
    """Part of the last backward behind which gradients hide."""
    exposed: float = 0.7
    """Part of the messages that never hides."""
    jitter: float = 0.013
    """Each doubling of devices."""


KERNELS = Kernels()


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """A framework: bytes moved against the unfused count, launches against the table, and its share of the network."""

    passes: float = 1.0
    encoder: float = 1.0
    """As passes, between the products of an encoder."""
    launch: float = 1.0
    network: float = 0.8
    gradient_bytes: float = 4.0


HABITS: dict[str, Habit] = {
    "mlperf": Habit(passes=0.4, launch=0.3, network=1.0),
    "fine-tuning": Habit(encoder=2.1, network=0.5),
    "oneflow": Habit(passes=0.51, launch=0.5, network=0.3),
    "ngc mxnet": Habit(passes=0.61, launch=0.5, network=0.28),
    "mxnet": Habit(passes=1.2, launch=1.0, network=0.24),
    "xla": Habit(passes=0.73, launch=0.7, network=0.35),
    "tensorflow2": Habit(passes=0.87, launch=1.0, network=0.15, encoder=1.8),
    "tensorflow": Habit(passes=1.2, launch=1.2, network=0.4, encoder=4.5),
    "paddle": Habit(passes=1.1, encoder=0.13, launch=0.8, network=0.15),
    "pytorch": Habit(passes=0.84, encoder=0.2, launch=1.0, network=0.25),
}
"""What fuses moves less: submissions to MLPerf, OneFlow, NVIDIA's MXNet and XLA fuse norm, addition and activation."""


def habit_of(framework: str, *, source: str = "", fine_tuned: bool = False) -> str:
    """The name of a framework's habits. Scripts that fine-tune BERT in PyTorch and Paddle lack the fused ones of
    pre-training.
    """
    name = framework.lower()
    if source == "mlperf":
        return "mlperf"
    if fine_tuned and "tensorflow" not in name:
        return "fine-tuning"
    name = name.replace("tensorflow 2", "tensorflow2")
    return next((key for key in HABITS if key in name), "pytorch")


NEEDED = ("model", "gpu", "gpus", "batch_per_gpu")


def columns(rows: Sequence[Row]) -> tuple[dict[str, Any], list[int], list[tuple[int, str]]]:
    """Columns of the rows that can be priced, which they are, and why the others cannot."""
    missing = [name for name in NEEDED if rows and name not in rows[0]]
    if missing:
        raise ValueError(f"the file lacks the columns {', '.join(missing)}")
    found: list[dict[str, Any]] = []
    priced, refused = [], []
    for number, row in enumerate(rows):
        try:
            found.append(_values(row))
            priced.append(number)
        except (ValueError, BadCluster) as error:
            refused.append((number, str(error)))
    return {name: np.array([row[name] for row in found]) for name in (found[0] if found else ())}, priced, refused


def _values(row: Row) -> dict[str, Any]:
    def number(name: str, default: float) -> float:
        text = row.get(name) or ""
        return float(text) if text else default

    batch, framework = number("batch_per_gpu", 1), row.get("framework", "")
    work = work_of(row["model"], batch=batch, length=number("seq", 0), framework=framework)
    part = device(row["gpu"])
    precision = row.get("precision") or "fp16"
    precision = "fp16" if precision in ("bf16", "fp8") else precision
    if precision == "fp32" and "tf32" in part.peak_flops and "tensorflow" in framework.lower():
        precision = "tf32"  # What TensorFlow calls FP32 on A100 is TF32, unless it is turned off.
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    return {
        "flops": work.flops,
        "numbers": work.numbers,
        "parameters": work.parameters,
        "layers": work.layers,
        "kind": KINDS.index(work.kind),
        "precision": PRECISIONS.index(precision),
        "peak": part.peak(precision),
        "stream": part.memory_bytes_per_s,
        "gpus": number("gpus", 1),
        "node": number("gpus_per_node", 8),
        "intra": 1e9 * number("intra_gb_s", 150),
        "inter": 1e9 * number("inter_gb_s", 12.5),
        "batch": batch,
        "micro": number("accumulate", 1),
        "habit": list(HABITS).index(
            habit_of(
                framework,
                source=row.get("source", ""),
                fine_tuned="bert" in row["model"].lower() and not row.get("seq"),
            )
        ),
    }


def step_times(
    given: Mapping[str, Any], kernels: Kernels = KERNELS, habits: Mapping[str, Habit] = HABITS
) -> np.ndarray:
    """Seconds a step of every row."""
    habit = {
        field.name: np.array([getattr(each, field.name) for each in habits.values()])[given["habit"]]
        for field in fields(Habit)
    }
    encoder, precision = given["kind"] == KINDS.index("encoder"), given["precision"]
    conv = np.array([kernels.conv_fp32, kernels.conv_tf32, kernels.conv_fp16])[precision]
    gemm = np.array([kernels.gemm_fp32, kernels.gemm_tf32, kernels.gemm_fp16])[precision]
    volume = np.array([kernels.volume_fp32, kernels.volume_fp32, kernels.volume])[precision]
    part = np.where(encoder, gemm, conv)
    part = part * np.where(given["kind"] == KINDS.index("grouped"), kernels.grouped, 1.0)
    part = part * np.where(given["kind"] == KINDS.index("volume"), volume, 1.0)
    element_bytes = np.where(precision == PRECISIONS.index("fp16"), 2.0, 4.0)
    passes = np.where(encoder, habit["encoder"] * kernels.encoder_passes, habit["passes"] * kernels.passes)
    moved_s = given["batch"] * given["numbers"] * element_bytes * passes / (PHYSICS.memory * given["stream"])
    device_s = given["batch"] * 3 * given["flops"] / (given["peak"] * part) + moved_s
    host_s = 3 * given["layers"] * kernels.launch_s * habit["launch"]
    pass_s = np.maximum(device_s, host_s)
    gpus = given["gpus"]
    local = np.minimum(gpus, given["node"])
    inside = PHYSICS.bus * given["intra"]
    rate = np.where(gpus > given["node"], habit["network"] * np.minimum(inside, local * given["inter"]), inside)
    sent_s = np.where(gpus > 1, 2 * (gpus - 1) / gpus * given["parameters"] * habit["gradient_bytes"] / rate, 0.0)
    shown_s = np.maximum(kernels.exposed * sent_s, sent_s - kernels.hidden * 2 / 3 * pass_s)
    update_s = PHYSICS.optimizer_bytes * given["parameters"] / (PHYSICS.memory * given["stream"])
    whole_s = given["micro"] * pass_s * (1 + kernels.jitter * np.log2(gpus)) + shown_s + update_s + kernels.step_s
    whole_s = whole_s + np.where(gpus > 1, kernels.sync_s, 0.0)
    return np.asarray(whole_s)


def predict_replicated(rows: Sequence[Row]) -> list[tuple[float | None, str]]:
    """(seconds a step, or None and the reason) of each row."""
    given, priced, refused = columns(rows)
    answers: list[tuple[float | None, str]] = [(None, "")] * len(rows)
    if priced:
        for number, step_s in zip(priced, step_times(given), strict=True):
            answers[number] = (float(step_s), "")
    for number, reason in refused:
        answers[number] = (None, reason)
    return answers


def main() -> None:
    rows = read_measurements(sys.argv[1])
    predictions = [
        Prediction(id=row.get("id", str(number)), step_s=step_s, reason=reason)
        for number, (row, (step_s, reason)) in enumerate(zip(rows, predict_replicated(rows), strict=True), start=1)
    ]
    print_scores(score(rows, predictions))
    for guess in predictions:
        if guess.reason:
            print(f"not predicted: {guess.id}: {guess.reason}")


if __name__ == "__main__":
    main()
