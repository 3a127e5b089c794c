"""From one projection to the region it opens: what follows from splitting its output, and whether that is possible.

The split is propagated until it ends in projections that sum over it. On the way other projections may have to join the
columns, parameters are split too, and some parameters are read in full by every rank. A region is refused if a
replicated activation is used inside it without passing through a column-parallel layer: its gradient would be an
unreduced partial sum.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal.layout.cuts import Cut
from shoal.layout.tensor.projections import Projection, operands, same_tensor
from shoal.layout.tensor.segments import Refuted
from shoal.layout.tensor.spread import CutPropagation, Graph, Spreading

ATTENTION = ("softmax", "scaled_dot_product")


@dataclass(slots=True)
class Found:
    """A region and the splits of its values."""

    kind: str
    parts: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cuts: dict[str, Cut]
    partial: tuple[str, ...]
    entry: str | None
    spreading: Spreading
    interior: frozenset[int]
    """Operations whose result is split."""


class Finder:
    """Finds the region of one projection after another."""

    def __init__(self, graph: Graph, known: dict[str, Projection], *, never_rows: Collection[str] = ()) -> None:
        self.graph = graph
        self.known = known
        self.path_of = {number: projection.path for projection in known.values() for number in projection.ops}
        self.placed: set[str] = set()
        self.never: dict[str, str] = {}
        """Projections that no region may contain -> why."""
        self.taken: dict[int, str] = {}
        """Further parameters that no region may split -> why."""
        self.never_rows = set(never_rows)
        self._names = {
            **{value: name for name, value in graph.trace.parameters.items()},
            **{value: name for name, value in graph.trace.buffers.items()},
        }

    def region_of(self, start: Projection, *, chained: bool) -> Found:
        """The region that a projection opens. `chained`: rows may feed columns of the same region."""
        value, dim = start.output(self.graph)
        uncut = {self._weight(path): "is cut in another region" for path in self.placed}
        uncut |= {self._weight(path): why for path, why in self.never.items()} | self.taken
        sum_at = [number for number, path in self.path_of.items() if path not in self.never_rows]
        spread = CutPropagation(self.graph, sum_at=sum_at, uncut=uncut)
        spreading = spread.run({value: Cut(dim, (self.graph.values[value].shape[dim],))})
        columns, rows = self._roles(spreading)
        if not rows:
            raise Refuted("nothing sums over its output")
        if both := set(columns) & set(rows):
            raise Refuted(f"{sorted(both)[0]} would be column and row at once")
        interior = frozenset(n for v in spreading.cuts if (n := self.graph.values[v].producer) >= 0)
        partial = self._read_whole(spreading, interior)
        if not chained:
            self._refuse_chains(spreading, interior)
        if spreading.parts == 1:
            raise Refuted("its parts cannot be split evenly among two or more ranks")
        names = sorted((self._names[v], v) for v in spreading.cuts if v in self._names)
        return Found(
            kind=self._kind(interior, [*columns, *rows]),
            parts=spreading.parts,
            columns=columns,
            rows=rows,
            cuts={name: spreading.cuts[v] for name, v in names},
            partial=partial,
            entry=self._entry(columns),
            spreading=spreading,
            interior=interior,
        )

    def _weight(self, path: str) -> int:
        return self.graph.trace.parameters[self.known[path].weight]

    def _roles(self, spreading: Spreading) -> tuple[tuple[str, ...], tuple[str, ...]]:
        columns, rows = [], []
        for projection in self.known.values():
            sums = [number in spreading.sums for number in projection.ops]
            cut = [self.graph.ops[number].outputs[0] in spreading.cuts for number in projection.ops]
            read = [operands(self.graph.ops[number], self.graph)[0] in spreading.cuts for number in projection.ops]
            if self._weight(projection.path) not in spreading.cuts:
                continue
            if any(sums):
                rows.append(projection.path)
            # A grouped convolution takes parts and returns parts: it is inside the region.
            if any(given and not taken for given, taken in zip(cut, read, strict=True)):
                columns.append(projection.path)
            if not all(sums) and not all(cut):
                raise Refuted(f"{projection.path} would be cut in one call and not in another")
        return tuple(columns), tuple(rows)

    def _is_column_input(self, number: int, value: int, spreading: Spreading) -> bool:
        if number not in self.path_of:
            return False
        source, weight = operands(self.graph.ops[number], self.graph)
        return value == source and weight in spreading.cuts

    def _read_whole(self, spreading: Spreading, interior: frozenset[int]) -> tuple[str, ...]:
        """Replicated parameters that are read together with parts; refuses such activations."""
        found: set[str] = set()
        for number in sorted(interior):
            op = self.graph.ops[number]
            if not self.graph.live[number]:
                continue
            for value in op.inputs:
                known = self.graph.values[value]
                if value in spreading.cuts or not known.learned or self._is_column_input(number, value, spreading):
                    continue
                if known.dtype.is_floating_point or known.dtype.is_complex:
                    found |= self._parameters_behind(value, op.module)
        return tuple(sorted(found))

    def _parameters_behind(self, value: int, module: str) -> set[str]:
        found: set[str] = set()
        open_values, seen = [value], {value}
        while open_values:
            value = open_values.pop()
            known = self.graph.values[value]
            if self.graph.from_batch[value]:
                raise Refuted(
                    f"{self.graph.ops[known.producer].name} in {module or 'the model'}: it combines parts with an "
                    "activation that is replicated on every rank; its gradient would be a partial sum"
                )
            if known.source == "parameter":
                found.add(known.name)
            elif known.producer >= 0:
                for v in self.graph.ops[known.producer].inputs:
                    if v not in seen and self.graph.values[v].learned:
                        seen.add(v)
                        open_values.append(v)
        return found

    def _refuse_chains(self, spreading: Spreading, interior: frozenset[int]) -> None:
        """A residual stream that is split from end to end would join all blocks into one region.

        Calls that share only weights are not a chain: they are one block applied repeatedly.
        """
        group = self._components(spreading, interior)
        fed: dict[int, set[int]] = {}
        for number in range(min(spreading.sums), max(interior, default=-1) + 1):
            op = self.graph.ops[number]
            reached = set().union(*(fed.get(v, set()) for v in op.inputs)) if op.inputs else set()
            if number in self.path_of and interior.intersection([number]):
                own = group.get(op.outputs[0])
                if own is not None and own in reached and number not in spreading.sums:
                    raise Refuted(f"{self.path_of[number]} would have to be cut with it, and depends on what it feeds")
            if number in spreading.sums:
                reached = reached | {group[v] for v in op.inputs if v in group}
            if reached:
                for v in op.outputs:
                    fed[v] = reached

    def _components(self, spreading: Spreading, interior: frozenset[int]) -> dict[int, int]:
        """Split value -> number of its connected component."""
        parent: dict[int, int] = {}

        def top(value: int) -> int:
            while parent.setdefault(value, value) != value:
                value = parent[value]
            return value

        for number in interior | spreading.sums:
            op = self.graph.ops[number]
            cut = [v for v in (*op.inputs, *op.outputs) if v in spreading.cuts and self.graph.from_batch[v]]
            for v in cut[1:]:
                parent[top(cut[0])] = top(v)
        return {v: top(v) for v in spreading.cuts if self.graph.from_batch[v]}

    def _kind(self, interior: frozenset[int], paths: list[str]) -> str:
        if any(word in self.graph.ops[number].name for number in interior for word in ATTENTION):
            return "heads"
        return "channels" if any(self.known[path].is_convolution for path in paths) else "features"

    def _entry(self, columns: tuple[str, ...]) -> str | None:
        """The largest module whose argument is the tensor that all columns read, and that uses it for nothing else. Its
        code may read the sizes of that tensor, so it must see the same tensor as the columns."""
        found = columns[0] if len(columns) == 1 else None
        parts = common_path(columns).split(".")
        for length in range(len(parts), 0, -1):
            path = ".".join(parts[:length])
            if path in columns:
                continue
            if not self._is_entry(path, columns):
                break
            found = path
        return found

    def _is_entry(self, path: str, columns: tuple[str, ...]) -> bool:
        calls = self.graph.trace.calls_of(path)
        if len(calls) != 1:
            return False
        call = calls[0]
        numbers = [number for column in columns for number in self.known[column].ops]
        read = {same_tensor(operands(self.graph.ops[number], self.graph)[0], self.graph) for number in numbers}
        given = {same_tensor(v, self.graph) for v in call.arguments if v is not None}
        if len(read) != 1 or not read <= given:
            return False
        source = next(iter(read))
        for number in range(call.first, call.stop):
            op = self.graph.ops[number]
            others = [v for v in op.inputs if same_tensor(v, self.graph) == source]
            is_view = bool(op.outputs) and same_tensor(op.outputs[0], self.graph) == source
            if others and not is_view and number not in numbers and self.graph.live[number]:
                return False
        return True


def common_path(paths: Collection[str]) -> str:
    """The innermost module that contains all of them; a single path itself."""
    split = [path.split(".") if path else [] for path in paths]
    shared: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
