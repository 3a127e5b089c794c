"""An embedding and a head cut by words: each rank holds some rows of the table and computes their logits.

The embedding looks up the words it has, gives zeros for the others, and the ranks add up. The head's logits stay cut
(`cut_logits.py`) where, by the plan, nothing but a cross entropy reads them, and are gathered otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.comm.mesh import Members
from shoal.layout.crossings import Tally
from shoal.layout.cuts import Cut
from shoal.layout.tensor.plan import Vocabulary
from shoal.parallel.collectives import copy_in, sum_out
from shoal.parallel.context.global_view import outside_global_view
from shoal.parallel.tensor.cut import Applied, transposed_product
from shoal.parallel.tensor.logits import CutLogits
from shoal.parallel.tensor.parameters import PlanDoesNotFit, cut_parameters, is_transposed
from shoal.parallel.tensor.regions import note, with_first_tensor, working_precision


def cut_vocabulary(
    model: nn.Module, vocabulary: Vocabulary, members: Members, *, tally: Tally | None = None
) -> Applied:
    """Cuts the embeddings and heads that the plan names; tied ones stay tied. All other parameters keep their whole
    gradient on every rank."""
    noted = Tally() if tally is None else tally
    if members.size == 1:
        return Applied(tally=noted)
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [path for path in (*vocabulary.embeddings, *vocabulary.heads) if path not in modules]
    if missing:
        raise PlanDoesNotFit(f"the plan names {missing[0]!r}, but the model has no module of that name")
    words = {path: _words(path, modules[path], vocabulary) for path in (*vocabulary.embeddings, *vocabulary.heads)}
    for path in vocabulary.embeddings:
        _require_plain(path, modules[path])
    done = cut_parameters(model, vocabulary.cuts, members, even=False)
    for path in vocabulary.embeddings:
        module: Any = modules[path]
        low, high = Cut(0, (words[path],)).intervals(members.size, members.index)[0]
        padding = module.padding_idx
        module.padding_idx = padding - low if padding is not None and low <= padding < high else None
        module.forward = partial(_look_up, path, module.forward, (low, high, words[path]), members, noted)
    for path in vocabulary.heads:
        module = modules[path]
        product = partial(transposed_product, module) if is_transposed(module) else module.forward
        module.forward = partial(project, product, words[path], vocabulary.loss_parallel, members, noted)
    return Applied(cuts=done, tally=noted)


def _words(path: str, module: nn.Module, vocabulary: Vocabulary) -> int:
    """The number of words, from the cut of the module's weight, whichever of its names the plan uses."""
    weight: Any = module.weight
    rows = weight.shape[1] if is_transposed(module) else weight.shape[0]
    if not any(cut.segments == (rows,) for cut in vocabulary.cuts.values()):
        raise PlanDoesNotFit(
            f"{path} has {rows} words, but the plan cuts {[c.segments for c in vocabulary.cuts.values()]}"
        )
    return rows


def _require_plain(path: str, module: nn.Module) -> None:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise PlanDoesNotFit(
                f"{path}: an embedding with {option} looks at more than the rows it is asked for and cannot be cut by "
                f"words; build it without {option}, or declare it whole"
            )


@outside_global_view
def _look_up(
    path: str, forward: Any, range_of_words: tuple[int, int, int], members: Members, tally: Tally, *args: Any, **kw: Any
) -> torch.Tensor:
    low, high, words = range_of_words
    words_asked: torch.Tensor = args[0] if args else next(iter(kw.values()))
    if words_asked.device.type == "cpu" and words_asked.numel():
        least, most = words_asked.aminmax()
        if least < 0 or most >= words:
            wrong = int(least) if least < 0 else int(most)
            raise IndexError(f"{path}: word {wrong} is out of range; the vocabulary has {words}")
    elsewhere = (words_asked < low) | (words_asked >= high)
    local = (words_asked - low).masked_fill(elsewhere, 0)
    if args:
        found = forward(local, *args[1:], **kw)
    else:
        found = forward(**{**kw, next(iter(kw)): local})
    found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    note(tally, "sum_out", found, gradient=found.requires_grad)
    return sum_out(found, members)


@outside_global_view
def project(
    product: Any, words: int, keep_cut: bool, members: Members, tally: Tally, *args: Any, **kwargs: Any
) -> torch.Tensor:
    def enter(x: torch.Tensor) -> torch.Tensor:
        x = working_precision(x)
        note(tally, "copy_in", x, gradient=torch.is_grad_enabled() and x.requires_grad)
        return copy_in(x, members)

    args, kwargs = with_first_tensor(args, kwargs, enter, dims=1)
    part = product(*args, **kwargs)
    cut = CutLogits.around(part, dim=part.dim() - 1, vocabulary=words, members=members, tally=tally)
    return cut if keep_cut else cut.gathered()
