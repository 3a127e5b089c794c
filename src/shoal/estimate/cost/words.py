"""Words of measured rows as people write them, each led to the word that the formulas know.

Tables name one thing in many ways ("1F1B-I", "zbv", "selective-AC", "MXFP8"): a row is worth more than its spelling.
What no rule knows is refused with its reason.
"""

from __future__ import annotations

import re

from shoal.estimate.cost.inputs import PRECISIONS, RECOMPUTE, SCHEDULES

Rules = tuple[tuple[str, str], ...]
"""(pattern, word it stands for), the first that is found counts."""

_SCHEDULES: Rules = (
    ("zero.?bubble|^zb|dual.?pipe|split.?backward|^v-(half|min|zb)", "zero-bubble"),
    ("interleav|virtual|vpp|loop|circular|breadth|1f1b-(i|v)$", "interleaved"),
    ("gpipe|afab|f-?then-?b|all-?forward", "gpipe"),
    ("1f1b|flush|dapple|default|memory-efficient", "1f1b"),
    ("pipedream|2bw", "pipedream"),
    ("^(none|no|off|0|-)$", "none"),
)
_RECOMPUTE: Rules = (
    ("^(none|no|off|0|0\\.0|false|-|disabled)$|^(no|without)-", "none"),
    ("select|partial|attn|attention|^op|^sac|every|norm|mlp|act-?func", "selective"),
    ("full|block|uniform|layer|^(1|1\\.0|true|yes|on)$|checkpoint|recomput", "full"),
)
_PRECISIONS: Rules = (
    ("(fp8|float8).*row|row.*(fp8|float8)", "fp8-rowwise"),
    ("fp8|float8|e4m3|e5m2|mxfp|nvfp4|fp4|float4", "fp8"),
    ("bf16|bfloat", "bf16"),
    ("tf32|tensorfloat", "tf32"),
    ("fp16|float16|half|^amp$|^16", "fp16"),
    ("fp32|float32|single|^32", "fp32"),
    ("mixed|^amp|^o[12]$", "bf16"),
)
V_SHAPED = re.compile(r"zb-?v|dual.?pipe|^v-|1f1b-v|interleaved.*bubble")
"""Schedules that lead each micro-batch over the ranks twice: at least two chunks on every rank by their nature."""


def schedule(given: str, *, pp: float, chunks: float) -> tuple[str, float]:
    """(schedule, chunks). Blank is 1f1b where there is a pipeline; 1f1b over several chunks is the interleaved one."""
    if pp <= 1:
        return "none", 1.0
    word = folded(given)
    if not word or word in ("none", "no", "-"):
        word = "1f1b"
    found = _word("schedule", word, given, _SCHEDULES, SCHEDULES)
    if V_SHAPED.search(word) or found == "interleaved":
        chunks = max(2.0, chunks)
    if found == "1f1b" and chunks > 1:
        found = "interleaved"
    return found, chunks


def recompute(given: str) -> str:
    """none, selective or full."""
    return _word("recompute", folded(given), given, _RECOMPUTE, RECOMPUTE)


def precision(given: str, *, has_fp8: bool = True) -> str:
    """A format of `PRECISIONS`; a device without fp8 runs such rows in 16 bits."""
    found = _word("precision", folded(given), given, _PRECISIONS, PRECISIONS)
    return "bf16" if found.startswith("fp8") and not has_fp8 else found


def zero(given: str) -> float:
    """The stage of sharding, 0 to 3, also by the name of who does it."""
    word = folded(given)
    digit = re.search(r"[0-3]", word)
    if digit and not word.startswith("fsdp"):
        return float(digit.group())
    if re.search("fsdp|hsdp|full-shard|zero$|infinity", word):
        return 3.0
    if re.search("shard-grad-op|sdp", word):
        return 2.0
    if re.search("distributed-opt|distopt", word):
        return 1.0
    if re.search("^(none|no|off|false|ddp|no-shard|-|)$", word):
        return 0.0
    raise ValueError(f"zero is {given!r}; expected 0, 1, 2 or 3")


def folded(given: str) -> str:
    """Lower case, words joined by dashes."""
    return re.sub(r"[\s_/+]+", "-", given.strip().lower())


def _word(name: str, word: str, given: str, rules: Rules, known: tuple[str, ...]) -> str:
    if word in known:
        return word
    for pattern, stands_for in rules:
        if re.search(pattern, word):
            return stands_for
    raise ValueError(f"{name} is {given!r}; expected one of {', '.join(known)}")
