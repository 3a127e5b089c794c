"""The vocabulary: embeddings that look up words of the batch, and the projections onto the same words.

Both are split along the vocabulary, unevenly if its size requires it. Tables that are looked up by position stay
unsplit, and so does a classifier, whose classes are not looked up in any embedding.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal.layout.cuts import Cut
from shoal.layout.tensor.dims import bind
from shoal.layout.tensor.plan import Vocabulary
from shoal.layout.tensor.projections import Projection, parameter_behind
from shoal.layout.tensor.segments import STRUCTURAL, NeedsSegments, Refuted
from shoal.layout.tensor.spread import Graph
from shoal.layout.trace import modules_by_path

SAME_WORDS = frozenset(
    "view _unsafe_view reshape slice select unsqueeze squeeze expand clone detach alias _to_copy contiguous clamp "
    "where masked_fill transpose permute t".split()
)
"""Operations that do not change token ids."""


def find_vocabulary(
    graph: Graph, known: dict[str, Projection], *, whole: Collection[str] = ()
) -> tuple[Vocabulary | None, dict[str, str]]:
    """The vocabulary; and path -> why, for embeddings and heads that stay unsplit."""
    names = graph.trace.parameter_names()
    tables = _tables(graph)
    why: dict[str, str] = {}
    tables = {path: weight for path, weight in tables.items() if path not in whole}
    if not tables:
        return None, why
    words = max(graph.values[weight].shape[0] for weight in tables.values())
    embeddings: dict[str, int] = {}
    heads: dict[str, int] = {}
    for path, weight in tables.items():
        if graph.values[weight].shape[0] == words:
            embeddings[path] = weight
    products = {number for projection in known.values() for number in projection.ops}
    for path, projection in known.items():
        value, dim = projection.output(graph)
        if graph.values[value].shape[dim] == words and path not in whole and _reaches_output(graph, value, products):
            heads[path] = graph.trace.parameters[projection.weight]
    cuts: dict[str, Cut] = {}
    for path, weight in list(embeddings.items()) + list(heads.items()):
        others = _other_readers(graph, weight, {*embeddings, *heads}, known)
        if others:
            why[path] = f"its weight is also read by {others}"
            embeddings.pop(path, None)
            heads.pop(path, None)
            continue
        cuts[names[weight]] = Cut(_word_dim(graph, weight, words), (words,))
    for path in heads:
        bias = _bias(graph, known[path])
        if bias is not None:
            cuts[names[bias]] = Cut(0, (words,))
    if not embeddings:
        return None, why
    found = Vocabulary(
        embeddings=tuple(embeddings),
        heads=tuple(heads),
        cuts=cuts,
        loss_parallel=len(heads) == 1 and _loss_takes_parts(graph, known[next(iter(heads))], words),
    )
    return found, why


def _tables(graph: Graph) -> dict[str, int]:
    """Path of each embedding that looks up entries of the batch -> its weight."""
    modules = modules_by_path(graph.trace.model)
    names = graph.trace.parameter_names()
    found: dict[str, int] = {}
    for op in graph.ops[: graph.trace.model_stop]:
        if op.name != "embedding":
            continue
        call = bind(op, graph.values)
        weight = parameter_behind(call.named["weight"].value, graph)
        if weight is None or not _are_words(graph, call.named["indices"].value):
            continue
        if call.named["scale_grad_by_freq"] or call.named["sparse"]:
            continue  # Their gradients need counts or norms over the full table.
        path, _, last = names[weight].rpartition(".")
        owner = modules[op.module]
        if any(param is getattr(modules[path], last) for param in owner.parameters(recurse=False)):
            found[op.module] = weight
    return found


def _are_words(graph: Graph, value: int) -> bool:
    """Whether indices are token ids of the batch."""
    while graph.values[value].source != "batch":
        number = graph.values[value].producer
        if number < 0 or graph.ops[number].name not in SAME_WORDS:
            return False
        inputs = [v for v in graph.ops[number].inputs if graph.from_batch[v] and not _is_truth(graph, v)]
        if len(inputs) != 1:
            return False
        value = inputs[0]
    return not graph.values[value].dtype.is_floating_point


def _is_truth(graph: Graph, value: int) -> bool:
    return graph.values[value].dtype.itemsize == 1 and not graph.values[value].dtype.is_signed


def _word_dim(graph: Graph, weight: int, words: int) -> int:
    shape = graph.values[weight].shape
    return 0 if shape[0] == words else shape.index(words)


def _bias(graph: Graph, projection: Projection) -> int | None:
    names = graph.trace.parameter_names()
    number = projection.ops[0]
    call = next(c for c in graph.trace.calls_of(graph.ops[number].module) if c.first <= number < c.stop)
    # Added in the product, or, if the input is not contiguous, by a following addition.
    read = [v for op in graph.ops[call.first : call.stop] for v in op.inputs]
    return next((v for v in read if v in names and len(graph.values[v].shape) == 1), None)


def _other_readers(graph: Graph, weight: int, paths: Collection[str], known: dict[str, Projection]) -> str:
    """A module that reads the weight and is neither embedding nor head."""
    for number in graph.users.get(weight, ()):
        if graph.ops[number].module not in paths and graph.live[number]:
            return graph.ops[number].module or "the model"
    return ""


def _reaches_output(graph: Graph, value: int, products: Collection[int]) -> bool:
    """Through element-wise operations and views only, and through no other projection."""
    open_values, seen = [value], {value}
    while open_values:
        value = open_values.pop()
        if value in graph.outputs:
            return True
        for number in graph.users.get(value, ()):
            op = graph.ops[number]
            if graph.live[number] and op.number < graph.trace.model_stop and number not in products:
                for v in op.outputs:
                    if v not in seen and graph.values[v].numel <= graph.values[value].numel:
                        seen.add(v)
                        open_values.append(v)
    return False


def _loss_takes_parts(graph: Graph, head: Projection, words: int) -> bool:
    """Whether logits are read only by a cross entropy over the vocabulary, computed in the loss."""
    value, dim = head.output(graph)
    cuts = {value: Cut(dim, (words,))}
    open_values = [value]
    normalised: set[int] = set()
    while open_values:
        value = open_values.pop()
        for number in graph.users.get(value, ()):
            op = graph.ops[number]
            if not graph.live[number]:
                continue
            if op.name == "_log_softmax":
                along = bind(op, graph.values).dim(of=graph.values[value].shape, default=-1)
                if along != cuts[value].dim or number < graph.trace.model_stop:
                    return False
                normalised.update(op.outputs)
                continue
            structural = op.name in STRUCTURAL
            alone = sum(v in graph.users and graph.values[v].source != "constant" for v in op.inputs) == 1
            if not (structural or op.name in SAME_WORDS or alone):
                return False
            try:
                others, _ = graph.follow(op, value, cuts[value], {})
            except (Refuted, NeedsSegments):
                return False
            for v in op.outputs:
                if v not in others or others[v].segments != (words,):
                    return False
                cuts[v] = others[v]
                open_values.append(v)
    return bool(normalised) and all(_only_picked(graph, v) for v in normalised)


def _only_picked(graph: Graph, value: int) -> bool:
    readers = [graph.ops[n] for n in graph.users.get(value, ()) if graph.live[n]]
    return bool(readers) and all(op.name == "nll_loss_forward" and op.inputs[0] == value for op in readers)
