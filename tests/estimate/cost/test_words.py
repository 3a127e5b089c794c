"""Words of tables, as people write them, reach the word that the formulas know; nonsense is refused."""

from __future__ import annotations

import pytest

from shoal.estimate.cost import words


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("1F1B", ("1f1b", 1)),
        ("", ("1f1b", 1)),
        ("PipeDream-Flush", ("1f1b", 1)),
        ("interleaved-1f1b", ("interleaved", 2)),
        ("1F1B-I", ("interleaved", 2)),
        ("LoopedBFS", ("interleaved", 2)),
        ("AFAB", ("gpipe", 1)),
        ("GPipe", ("gpipe", 1)),
        ("zb-h1", ("zero-bubble", 1)),
        ("ZB-2p", ("zero-bubble", 1)),
        ("Zero Bubble", ("zero-bubble", 1)),
        ("zbv", ("zero-bubble", 2)),
        ("DualPipe", ("zero-bubble", 2)),
        ("PipeDream-2BW", ("pipedream", 1)),
    ],
)
def test_schedules(given: str, found: tuple[str, float]) -> None:
    assert words.schedule(given, pp=4, chunks=1) == found


def test_without_a_pipeline_there_is_no_schedule_and_chunks_make_1f1b_interleaved() -> None:
    assert words.schedule("1f1b", pp=1, chunks=4) == ("none", 1.0)
    assert words.schedule("1f1b", pp=4, chunks=4) == ("interleaved", 4)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("None", "none"),
        ("0", "none"),
        ("False", "none"),
        ("selective (op)", "selective"),
        ("core_attn", "selective"),
        ("SAC", "selective"),
        ("Full", "full"),
        ("block", "full"),
        ("uniform", "full"),
        ("activation checkpointing", "full"),
        ("1", "full"),
    ],
)
def test_recomputation(given: str, found: str) -> None:
    assert words.recompute(given) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("BF16", "bf16"),
        ("bfloat16", "bf16"),
        ("amp_bf16", "bf16"),
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("float16", "fp16"),
        ("FP8", "fp8"),
        ("amp_fp8", "fp8"),
        ("MXFP8", "fp8"),
        ("nvfp4", "fp8"),
        ("float8 rowwise", "fp8-rowwise"),
        ("TF32", "tf32"),
        ("float32", "fp32"),
    ],
)
def test_precisions(given: str, found: str) -> None:
    assert words.precision(given) == found


def test_a_device_without_fp8_runs_in_sixteen_bits() -> None:
    assert words.precision("fp8", has_fp8=False) == "bf16"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("0", 0),
        ("1.0", 1),
        ("ZeRO-3", 3),
        ("FSDP2", 3),
        ("HSDP", 3),
        ("SHARD_GRAD_OP", 2),
        ("stage 2", 2),
        ("DDP", 0),
        ("distributed optimizer", 1),
    ],
)
def test_stages_of_sharding(given: str, found: float) -> None:
    assert words.zero(given) == found


@pytest.mark.parametrize("read", [words.recompute, words.precision, words.zero])
def test_nonsense_is_refused_with_what_was_given(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="'gibberish'"):
        read("gibberish")
