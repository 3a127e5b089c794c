"""The profile of a framework by its name as people write it: one of `profiles.toml`, with what a device, a precision or
a schedule changes in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from shoal.estimate.cost import words
from shoal.estimate.cost.profile import Profile
from shoal.files.toml import read_toml


def _read() -> dict[str, Profile]:
    found: dict[str, Profile] = {}
    for name, numbers in read_toml(Path(__file__).with_name("profiles.toml")).items():
        base = numbers.pop("base", None)
        found[name] = replace(found[base] if base else Profile(), name=name, **numbers)
    return found


PROFILES = _read()
GOOD = PROFILES["good"]
FP32_ACCUMULATION = {
    "gradient_held_bytes": 6.0,
    "gradient_bytes": 4.0,
    "reduce_whole": 1.0,
    "step_bytes": 0.0,
    "data_hidden": 0.0,
    "shard_hidden": 0.0,
    "data_exposed": 1.0,
}
"""What bf16 changes in Megatron-DeepSpeed. Known: every gradient of 16 bits is added to a flat buffer in 32 bits, full
on each rank (deepspeed/runtime/bf16_optimizer.py), which is all-reduced after the last pass, so nothing hides it
(deepspeed/runtime/pipe/engine.py).
"""
COMPILED = 0.5
"""A compiler fuses memory-bound operations: their bytes, against those without. Fitted (torchtitan)."""
ASYNC_TENSOR = 0.55
"""Part of tp's messages that asynchronous tensor parallelism hides. Fitted (torchtitan)."""


FAMILIES: tuple[tuple[str, str], ...] = (
    ("nanotron", "nanotron"),
    ("torchtitan", "torchtitan"),
    ("megatron-deepspeed|meg-ds|neox|bigscience|forge|optimus", "megatron-deepspeed"),
    ("nemo|bridge|dgxc|primus", "nemo"),
    ("megatron|zero-bubble|^zb|fold3d|transformer-?engine", "megatron"),
    ("foundry|mosaic|composer", "mosaic"),
    ("maxtext|jax|xla|alpa|pax|levanter|easylm|t5x|flax", "xla"),
    ("deepspeed|zero|ulysses", "deepspeed"),
    ("fsdp|accelerate|hugging|axolotl|llama-?factory|trl|transformers|lightning|torchtune", "eager"),
)
"""The profile of a framework, by what its name contains; the first match counts."""
NO_FLASH = ("V100", "T4")
"""Devices that fused attention was never written for."""
OLD_HOSTS = 1.3
"""Hosts of those devices' time, against A100's: a Xeon E5-2698 v4 runs at 2.7 GHz where an EPYC 7742 runs at 3.2, and
does less in a cycle. Assumed from that: no row here says how much a launch feels of it.
"""
ONCE_AHEAD, TWICE_AHEAD = re.compile(r"(zb|bubble).*(1p|h1)\b"), re.compile(r"(zb|bubble).*(2p|h2)\b")
"""Zero-bubble schedules by name: which hold as many micro-batches as 1f1b, and which twice as many."""
SPLIT_FORK = re.compile(r"zero-?bubble|zb")
"""Megatron-LM's fork with these schedules lets them hold twice as many by default (examples/pretrain_zero_bubble.sh:
ZERO_BUBBLE_MEM_LIMIT is twice the stages).
"""


def profile_for(
    framework: str, *, device: str = "", precision: str = "", schedule: str = "", young: bool = False
) -> Profile:
    """The profile of a framework by its name as people write it; the usual one, if it is not known.

    Megatron-LM and DeepSpeed in fp16 on A100 and older are those of 2021, without fused attention, unless the model is
    a `young` one (or the branch is that of zero-bubble). Megatron-DeepSpeed got it with later devices and models.
    """
    name = re.sub(r"[\s_]+", "-", framework.strip().lower())
    family = next((family for pattern, family in FAMILIES if re.search(pattern, name)), "usual")
    said = f"{words.folded(schedule)} {name}"
    fork = family == "megatron" and SPLIT_FORK.search(name) and not ONCE_AHEAD.search(said)
    before = device.startswith((*NO_FLASH, "A100")) and not young
    old = before and precision in ("fp16", "fp32", "tf32")
    if family == "megatron" and old and not re.search("core|zero-?bubble|zb", name):
        family = "megatron-2021"
    elif family == "deepspeed" and old:
        family = "deepspeed-2021"
    found = PROFILES[family]
    if family == "megatron-deepspeed":
        if not before or ("neox" in name and not old):
            found = replace(found, name="megatron-deepspeed-fused", flash=1.0)
        if precision == "bf16":
            found = replace(found, name=f"{found.name}-bf16", **FP32_ACCUMULATION)
    if family == "torchtitan" and "compile" in name:
        found = replace(found, name="torchtitan-compiled", elementwise=found.elementwise * COMPILED)
    if "async-tp" in name:
        found = replace(found, name=f"{found.name}-async-tp", tensor_hidden=ASYNC_TENSOR)
    if device.startswith(NO_FLASH) and found.flash:
        found = replace(found, name=f"{found.name}-unfused", flash=0.0)
    if device.startswith(NO_FLASH):
        hosts = ("host_layer_s", "host_tensor_s", "host_pass_s", "host_expert_s")
        found = replace(found, **{host: OLD_HOSTS * getattr(found, host) for host in hosts})
    if fork or TWICE_AHEAD.search(said):
        found = replace(found, name=f"{found.name}-ahead", split_ahead=2.0)
    return found
