"""The tensor plan of a traced model: which projections are columns, which are rows, which stay unsplit, and why.

Every projection is tried as the beginning of a region, in the order of the model's calls; declarations of the job and
the model's own plan come first. Each region found is replayed on fake tensors with other sizes, so that a plan never
depends on a size that is fixed elsewhere in the model's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from shoal.layout.blocks import blocks
from shoal.layout.recorded import Trace
from shoal.layout.tensor.plan import Region, TensorPlan, sizes_known_inside
from shoal.layout.tensor.projections import Projection, projections
from shoal.layout.tensor.regions import Finder, Found
from shoal.layout.tensor.scaled import Scaling, Sizes
from shoal.layout.tensor.segments import Refuted
from shoal.layout.tensor.spread import Graph
from shoal.layout.tensor.tokens import token_dimension
from shoal.layout.tensor.vocabulary import find_vocabulary
from shoal.layout.trace import modules_by_path

Role = Literal["column", "row", "whole"]
ROLES: tuple[Role, ...] = ("column", "row", "whole")


class InvalidRole(ValueError):
    """A role that the job declares does not hold for its model."""


def tensor_plan(trace: Trace, *, declared: Mapping[str, str] | None = None) -> TensorPlan:
    """What tensor parallelism can split in the model.

    `declared` maps patterns of module paths ("layers.*.proj") to "column", "row" or "whole".
    """
    graph = Graph(trace)
    known, whole = projections(graph)
    modules = modules_by_path(trace.model)
    wishes = _declared(known, whole, modules, declared or {})
    kept = {path for path, role in wishes.items() if role == "whole" and path in known}
    vocabulary, left = find_vocabulary(graph, known, whole=set(wishes))
    whole = {**whole, **left}
    finder = Finder(graph, known, never_rows=[path for path, role in wishes.items() if role == "column"])
    finder.never = dict.fromkeys(kept, "the job declares whole")
    if vocabulary is not None:
        finder.never |= dict.fromkeys(vocabulary.heads, "is cut by words")
        finder.taken = {trace.parameters[name]: "is cut by words" for name in vocabulary.cuts}
    whole |= {path: "the job declares it" for path in kept}
    scaling = Scaling(graph, modules)
    found = _regions(finder, scaling, _order(known, wishes, trace.model), whole, wishes)
    found = _without_mixed_gradients(graph, found, whole)
    found = _without_quarrels(scaling, found, trace.model, whole)
    regions = tuple(_region(region, sizes) for region, sizes in found)
    columns = {path for region in regions for path in region.columns}
    rows = {path for region in regions for path in region.rows}
    _check_declared(wishes, columns, rows, whole)
    dim, why, tokens = token_dimension(graph, known, columns=columns, rows=rows)
    if dim is not None and (early := next((r for r in regions if not sizes_known_inside(r)), None)) is not None:
        dim, tokens = None, 0
        why = f"{early.views[0].module or 'the model'} reads the sizes of its input before that is gathered"
    cut = {path for path, each in known.items() if any(each.weight in region.cuts for region in regions)}
    cut |= set(vocabulary.heads) if vocabulary else set()
    return TensorPlan(
        regions=regions,
        vocabulary=vocabulary,
        whole={path: reason for path, reason in whole.items() if path not in cut},
        sequence_dim=dim,
        tokens=tokens,
        why_no_sequence=why,
    )


def _regions(
    finder: Finder, scaling: Scaling, order: list[Projection], whole: dict[str, str], wishes: dict[str, Role]
) -> list[tuple[Found, Sizes]]:
    """Every region: first those without rows that feed columns, then the rest."""
    found: list[tuple[Found, Sizes]] = []
    for chained in (False, True):
        for start in order:
            if start.path in finder.placed or start.path in finder.never or wishes.get(start.path) == "row":
                continue
            try:
                region = finder.region_of(start, chained=chained)
                sizes = scaling.sizes(region)
            except Refuted as refusal:
                whole.setdefault(start.path, str(refusal))
                continue
            finder.placed.update(path for path, each in finder.known.items() if each.weight in region.cuts)
            found.append((region, sizes))
    first_op = {path: projection.ops[0] for path, projection in finder.known.items()}
    return sorted(found, key=lambda entry: first_op[entry[0].columns[0]])


def _region(found: Found, sizes: Sizes) -> Region:
    return Region(
        kind=found.kind,
        parts=found.parts,
        columns=found.columns,
        rows=found.rows,
        cuts=found.cuts,
        scaled=sizes.attributes,
        views=sizes.views,
        partial=found.partial,
        entry=found.entry,
    )


def _without_mixed_gradients(
    graph: Graph, found: list[tuple[Found, Sizes]], whole: dict[str, str]
) -> list[tuple[Found, Sizes]]:
    """Drops regions that read a replicated parameter together with parts if other code reads it with full tensors: one
    share of its gradient would be a partial sum, the other the sum itself."""
    while True:
        interior = frozenset().union(*(region.interior for region, _ in found))
        mixed = {
            name
            for name in {name for region, _ in found for name in region.partial}
            if not _readers(graph, graph.trace.parameters[name]) <= interior
        }
        bad = [region for region, _ in found if mixed.intersection(region.partial)]
        if not bad:
            return found
        for region in bad:
            name = sorted(mixed.intersection(region.partial))[0]
            for path in (*region.columns, *region.rows):
                whole[path] = f"it reads {name}, which is also read where nothing is split"
        found = [entry for entry in found if entry[0] not in bad]


def _without_quarrels(
    scaling: Scaling, found: list[tuple[Found, Sizes]], model: nn.Module, whole: dict[str, str]
) -> list[tuple[Found, Sizes]]:
    """Drops regions of a block that divide an attribute which another of its regions needs unchanged."""
    kept = list(found)
    for path, _ in blocks(model):
        inside = [entry for entry in kept if entry[0].columns[0].startswith(path + ".")]
        dividing = [entry for entry in inside if entry[1].attributes]
        if len(inside) < 2 or not dividing or scaling.hold_together(inside):
            continue
        for entry in dividing:
            kept.remove(entry)
            for name in (*entry[0].columns, *entry[0].rows):
                whole[name] = f"it divides {entry[1].attributes[0][1]}, which another region of {path} needs unchanged"
    return kept


def _readers(graph: Graph, value: int) -> set[int]:
    """The operations that combine a parameter (or a value computed from parameters alone) with the samples."""
    found: set[int] = set()
    open_values = [value]
    while open_values:
        for number in graph.users.get(open_values.pop(), ()):
            if not graph.live[number]:
                continue
            if any(graph.from_batch[v] for v in graph.ops[number].outputs):
                found.add(number)
            else:
                open_values.extend(graph.ops[number].outputs)
    return found


def _declared(
    known: Mapping[str, Projection],
    refused: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    declared: Mapping[str, str],
) -> dict[str, Role]:
    wishes: dict[str, Role] = {}
    for pattern, role in declared.items():
        if role not in ROLES:
            raise InvalidRole(f"{pattern!r} is declared {role!r}, but a role is one of {', '.join(ROLES)}")
        # "whole" may also be declared for an embedding, or for a block with everything in it.
        among = (path for path in modules if path) if role == "whole" else known
        paths = [path for path in among if fnmatchcase(path, pattern)]
        if not paths:
            none = [path for path in refused if fnmatchcase(path, pattern)]
            reason = f"{none[0]} is not: {refused[none[0]]}" if none else f"the model has {', '.join(list(known)[:8])}"
            raise InvalidRole(f"{pattern!r} is declared {role!r}, but matches no projection; {reason}")
        wishes |= {path: ROLES[ROLES.index(role)] for path in paths}
    return wishes


def _check_declared(wishes: dict[str, Role], columns: set[str], rows: set[str], whole: dict[str, str]) -> None:
    for path, role in wishes.items():
        if (role == "column" and path not in columns) or (role == "row" and path not in rows):
            is_now = "a row" if path in rows else "a column" if path in columns else "whole"
            why = whole.get(path, "no region ends in it")
            raise InvalidRole(f"{path} is declared a {role}, but can only be {is_now}: {why}")


def _order(known: dict[str, Projection], wishes: dict[str, Role], model: nn.Module) -> list[Projection]:
    """Declared columns first, then columns of the model's own plan, then the rest in call order."""
    own = own_plan(model)

    def rank(projection: Projection) -> int:
        if wishes.get(projection.path) == "column":
            return 0
        style = next((style for pattern, style in own.items() if fnmatchcase(projection.path, pattern)), "")
        return 1 if style.startswith("colwise") else 3 if style.startswith("rowwise") else 2

    return sorted(known.values(), key=rank)


def own_plan(model: nn.Module) -> dict[str, str]:
    """The plan that a Hugging Face model carries: pattern -> style, as paths from the root of the model."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping):
            found |= {f"{path}.{pattern}" if path else str(pattern): str(style) for pattern, style in plan.items()}
    return found
