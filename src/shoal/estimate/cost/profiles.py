"""Profiles of known frameworks, as data. Fitted where rows identify a constant, else known from the framework's own
documents.

"fitted" names the rows: vTrain's (Megatron-DeepSpeed on A100), Megatron-LM's README, the papers of 2021 and 2022,
MosaicML's LLM Foundry, torchtitan's reports, and the Ultra-Scale Playbook's (nanotron on one H100 cluster over EFA).
"""

from __future__ import annotations

import re
from dataclasses import replace

from shoal.estimate.cost import words
from shoal.estimate.cost.profile import Profile

GOOD = Profile()
"""A framework with fused attention, overlapped gradients and a lean host path: the default of plans, with a
margin in memory. Rows of frameworks without measured steps take `USUAL`.
"""

MEGATRON_2021 = Profile(
    name="megatron-2021",
    host_layer_s=0.85e-3,
    flash=0.0,  # Known: written before FlashAttention.
    # Known: gradients stay in fp16 (16 bytes a parameter in all, Rajbhandari et al. 2020), and the optimiser's step
    # copies them into 32 bits (Megatron-Core's guide, distributed optimizer: 20 bytes, or 4 + 16/dp).
    gradient_held_bytes=2.0,
    step_bytes=4.0,
    usable=0.97,  # Assumed: published runs fill their devices.
    elementwise=0.87,  # Fitted.
)
MEGATRON = Profile(
    name="megatron",
    host_layer_s=0.85e-3,
    # Known from its README: messages of tp, dp and pp overlap (--tp-comm-overlap and its like). How much is fitted.
    tensor_hidden=0.747,
    message_ratio=0.423,
    shard_hidden=0.809,
    flash_hopper=0.656,
    elementwise=0.949,
    gate_kept=1.0,  # Known: SwiGLU is one kernel.
    usable=0.97,
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021, name="megatron-deepspeed",
    host_layer_s=0.000933, host_tensor_s=6.5e-06, host_pass_s=0.000811, elementwise=0.78,  # Fitted.
)  # fmt: skip
FP32_ACCUMULATION = {
    "gradient_held_bytes": 6.0, "gradient_bytes": 4.0, "reduce_whole": 1.0, "step_bytes": 0.0,
    "data_hidden": 0.0, "shard_hidden": 0.0, "data_exposed": 1.0,
}  # fmt: skip
"""What bf16 changes in Megatron-DeepSpeed. Known: every gradient of 16 bits is added to a flat buffer in 32 bits, full
on each rank (deepspeed/runtime/bf16_optimizer.py), which is all-reduced after the last pass, so nothing hides it
(deepspeed/runtime/pipe/engine.py).
"""
NEMO = replace(
    MEGATRON, name="nemo",
    # Known from its recipes: gradients stay and travel in 16 bits, experts are folded over tp and tokens sent once to a
    # node (DeepEP and its like), attention is cuDNN's. That a kernel written for Hopper and Blackwell gets nearly as
    # much of them as one for A100 gets of A100 is assumed: no row here shows it.
    gradient_held_bytes=2.0, expert_folded=1.0, flash_hopper=0.9, usable=0.98,
)  # fmt: skip
DEEPSPEED_2021 = Profile(
    name="deepspeed-2021",
    host_layer_s=0.85e-3,
    flash=0.0,
    # Fitted (Narayanan 2021, its comparison with ZeRO-3): as if through one card a node, and little hidden.
    one_card=1.0,
    # Known from its documents: modules are gathered one by one, the largest is a third of a layer. Its rows show no
    # third gather for recomputation (with one, models of 530 billion come out a fifth slower against those of 175).
    gathered_layers=0.33,
    usable=0.97,
    contention=0.0,
    unhidden=0.515,
    elementwise=0.998,
)
MOSAIC = Profile(
    name="mosaic",
    elementwise=1.14, contention=0.697,  # Fitted.
    norm_bytes=6.0, logit_bytes=6.0, usable=0.97,  # From its largest micro-batches that ran.
)  # fmt: skip
TORCHTITAN = Profile(
    name="torchtitan",
    # Known: "selective" saves every other matrix product and attention. How much time that costs is fitted.
    selective_gemm=0.677, selective_attention=0.0, selective_rest=0.527, selective_kept=0.5,
    elementwise=1.81, flash_hopper=0.677, contention=0.21,  # Fitted.
    logit_bytes=12.0, usable=0.95,  # Known: logits and their gradients in 16 and 32 bits.
)  # fmt: skip
NANOTRON = Profile(
    name="nanotron",
    gradient_bytes=4.0,  # Known: gradients are accumulated and reduced in 32 bits.
    by_cost=1.0,  # Known: blocks are assigned to stages by their weights, the head counted.
    shard_hidden=0.0,
    host_layer_s=0.00147, host_tensor_s=5.68e-06, host_pass_s=0.000729, elementwise=1.36, flash_hopper=0.518,
    data_hidden=0.401, data_exposed=0.146, buckets=0.366,
    hop_ratio=7.1, hop_power=0.648,
    # Two slow states that no column of its rows names: with a pipeline, tensor parallelism waits for hosts; on 512
    # devices (256 with 32 sharding replicas) each message between stages, tensor parallelism over a node, and sums
    # over many replicas stall. Messages between stages of 32 ranks over four nodes stall on any number of devices.
    stall_tensor_s=0.002, stall_power=1.08, stall_message_s=0.274, stall_reduce_s=5.28e-12,
    crowd_devices=512, crowd_replicas=32, crowd_tensor=32,
    # Memory: fitted on its published peaks.
    gradient_held_bytes=5.6, state_bytes=13.0, norm_bytes=7.0, attention_bytes=4.0, ffn_bytes=2.1, regathered_bytes=3.4,
    regathered_deep=0.55, buffer_bytes=0.32e9, usable=0.88,
    # Eleven runs were predicted to need more than the device has, and ran: each took 2 to 8 times as long. Fitted.
    overfull=3.63,
)  # fmt: skip

# Families of which no row was fitted, between the profiles of those that were.
# Counted for a loss that is not fused: logits in 16 and 32 bits, their softmax, a gradient of each less what is freed.
USUAL = replace(
    GOOD, name="usual", elementwise=1.15, contention=0.4, flash_hopper=0.62, logit_bytes=12.0,
    usable=0.94,  # Between 0.88 and 0.97, which rows gave.
)  # fmt: skip
"""A competent framework without measured steps: between Megatron's, MosaicML's and torchtitan's."""
EAGER = replace(
    USUAL, name="eager", elementwise=1.4, contention=0.5,
    # Known (transformers, modeling_llama.py): a norm keeps its input in 32 bits and its result before and after the
    # weight; logits are kept in 16 bits, widened, shifted into a copy, and have a softmax and its gradient in 32.
    norm_bytes=16.0, logit_bytes=16.0,
)  # fmt: skip
"""Models written operator by operator (Hugging Face's) under FSDP."""
DEEPSPEED = replace(
    EAGER, name="deepspeed",
    # Known (deepspeed/runtime/zero/config.py): 1e9 parameters may stay gathered, and 5e8 gradients are reduced at a
    # time.
    live_parameters=1e9, buffer_bytes=2e9,
)  # fmt: skip
"""The same under DeepSpeed of today."""
XLA = replace(
    USUAL, name="xla", elementwise=0.85, flash_hopper=0.9, tensor_hidden=0.3,
    host_layer_s=0.1e-3, host_pass_s=0.2e-3, host_tensor_s=1e-6, logit_bytes=8.0,
)  # fmt: skip
"""One compiled program a step: operations are fused, and the host launches next to nothing."""

PROFILES: dict[str, Profile] = {each.name: each for each in (
    GOOD, MEGATRON, MEGATRON_2021, MEGATRON_DEEPSPEED, NEMO, DEEPSPEED_2021, MOSAIC, TORCHTITAN, NANOTRON, USUAL, EAGER,
    DEEPSPEED, XLA,
)}  # fmt: skip

COMPILED = 0.5
"""A compiler fuses memory-bound operations: their bytes, against those without. Fitted (torchtitan)."""
ASYNC_TENSOR = 0.55
"""Part of tp's messages that asynchronous tensor parallelism hides. Fitted (torchtitan)."""


FAMILIES: tuple[tuple[str, Profile], ...] = (
    ("nanotron", NANOTRON),
    ("torchtitan", TORCHTITAN),
    ("megatron-deepspeed|meg-ds|neox|bigscience|forge|optimus", MEGATRON_DEEPSPEED),
    ("nemo|bridge|dgxc|primus", NEMO),
    ("megatron|zero-bubble|^zb|fold3d|transformer-?engine", MEGATRON),
    ("foundry|mosaic|composer", MOSAIC),
    ("maxtext|jax|xla|alpa|pax|levanter|easylm|t5x|flax", XLA),
    ("deepspeed|zero|ulysses", DEEPSPEED),
    ("fsdp|accelerate|hugging|axolotl|llama-?factory|trl|transformers|lightning|torchtune", EAGER),
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
    found = next((profile for pattern, profile in FAMILIES if re.search(pattern, name)), USUAL)
    said = f"{words.folded(schedule)} {name}"
    fork = found is MEGATRON and SPLIT_FORK.search(name) and not ONCE_AHEAD.search(said)
    before = device.startswith((*NO_FLASH, "A100")) and not young
    old = before and precision in ("fp16", "fp32", "tf32")
    if found is MEGATRON and old and not re.search("core|zero-?bubble|zb", name):
        found = MEGATRON_2021
    elif found is DEEPSPEED and old:
        found = DEEPSPEED_2021
    elif found is MEGATRON_DEEPSPEED:
        if not before or ("neox" in name and not old):
            found = replace(found, name="megatron-deepspeed-fused", flash=1.0)
        if precision == "bf16":
            found = replace(found, name=f"{found.name}-bf16", **FP32_ACCUMULATION)
    if found is TORCHTITAN and "compile" in name:
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
