"""A tensor plan as a few lines of text: identical blocks on one line, unsplit projections with the reason."""

from __future__ import annotations

import re

from shoal.layout.tensor.plan import Region, TensorPlan
from shoal.layout.tensor.regions import common_path


def plan_lines(plan: TensorPlan) -> list[str]:
    """One line for each kind of region ("layers.*.self_attn: heads in 4 parts: q_proj, k_proj -> o_proj")."""
    times: dict[str, int] = {}
    for region in plan.regions:
        line = _region_line(region)
        times[line] = times.get(line, 0) + 1
    lines = [line if num == 1 else f"{line} ({num} times)" for line, num in times.items()]
    if plan.vocabulary is not None:
        names = ", ".join((*plan.vocabulary.embeddings, *plan.vocabulary.heads))
        loss = ", loss on parts" if plan.vocabulary.loss_parallel else ""
        words = next(iter(plan.vocabulary.cuts.values())).size
        lines.append(f"vocabulary of {words}: {names}{loss}")
    lines += [f"whole: {path or 'the model itself'}: {why}" for path, why in _distinct(plan.whole).items()]
    if plan.sequence_dim is not None:
        lines.append(f"between regions: tokens (dimension {plan.sequence_dim}) may be cut")
    elif plan.why_no_sequence:
        lines.append(f"between regions: tokens stay whole: {plan.why_no_sequence}")
    return lines


def _region_line(region: Region) -> str:
    root = common_path([*region.columns, *region.rows])
    below = [_below(path, root) for path in region.columns]
    after = [_below(path, root) for path in region.rows]
    where = _starred(root) or "model"
    return f"{where}: {region.kind} in {region.parts} parts: {', '.join(below)} -> {', '.join(after)}"


def _below(path: str, root: str) -> str:
    return path[len(root) + 1 :] if root and path != root else path


def _starred(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)


def _distinct(whole: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, why in whole.items():
        found.setdefault(_starred(path), _starred_text(why))
    return found


def _starred_text(text: str) -> str:
    return re.sub(r"\.\d+(?=[.:\s])", ".*", text)
