"""A job whose model starts from weights in files: `start_from(job, path)`, and `--start-from PATH`.

Names are matched before anything is read: every tensor of the model's state_dict must be there, in its shape, and the
file must not have more of the model than the model. Files of other trainers hold the model below a name of
theirs ("model.", "module.", "state_dict.model."): the one under which the model's names are found is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.common.suggest import did_you_mean
from shoal.job.errors import JobError
from shoal.job.job import Job
from shoal.job.weights.files import WeightFiles, weight_files

Rename = Callable[[str], str]
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers of PyTorch put into names."""


class WeightsDoNotMatch(JobError):
    """The tensors of the files are not those of the model."""


def start_from(job: Job, path: str | Path, *, rename: Rename | None = None, new: Sequence[str] = ()) -> Job:
    """The job with another start: its model has the weights in a file or folder.

    Args:
        job: Its model is built as ever, then filled.
        path: Safetensors, a state_dict of torch.save, a torch.distributed.checkpoint folder, or a consolidated
            checkpoint of DeepSpeed or Megatron.
        rename: The model's name of a tensor -> its name in the file.
        new: Patterns of tensors that keep their random start: a head that the file does not have.

    Raises:
        JobError: When the model is built, if the file has not what the model needs.

    Example:
        job = start_from(job, "checkpoints/step-1000", rename=lambda name: name.replace("blocks", "layers"))
    """
    return replace(job, model=FromWeights(job.model, path, rename=rename, new=new))


class FromWeights:
    """A job's `model` that fills every model it builds."""

    def __init__(
        self, build: Callable[[], nn.Module], path: str | Path, *, rename: Rename | None = None, new: Sequence[str] = ()
    ) -> None:
        self.build, self.path, self.rename, self.new = build, path, rename, new

    def __call__(self) -> nn.Module:
        model = self.build()
        if has_memory(model):
            fill(model, weight_files(self.path), rename=self.rename, new=self.new)
        return model


def has_memory(model: nn.Module) -> bool:
    """Whether it is a model of values, and not one that is built for its names and shapes."""
    return not any(tensor.is_meta for tensor in model.parameters())


def fill(model: nn.Module, files: WeightFiles, *, rename: Rename | None = None, new: Sequence[str] = ()) -> None:
    """Gives every tensor of the model's state_dict its values in the files."""
    targets = _matched(model, files, rename or (lambda name: name), new)
    with torch.no_grad():
        files.read_into(targets)


def _matched(model: nn.Module, files: WeightFiles, rename: Rename, new: Sequence[str]) -> dict[str, Tensor]:
    """Name in the files -> tensor of the model."""
    state = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    stored = {plain(name): name for name in files.tensors}
    wanted = {name: plain(rename(name)) for name in state}
    prefix = _prefix(wanted.values(), stored)
    targets: dict[str, Tensor] = {}
    missing, used = [], set()
    for group in names.values():
        found = [prefix + wanted[name] for name in group if prefix + wanted[name] in stored]
        used.update(found)
        if found:
            targets[stored[found[0]]] = state[group[0]]
        elif not any(fnmatchcase(name, pattern) for name in group for pattern in new):
            missing.append(group[0])
    _require(model, files, missing, {name for name in stored if name.startswith(prefix)} - used, prefix, wanted)
    _require_shapes(files, targets)
    return targets


def plain(name: str) -> str:
    """A name without what wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _prefix(wanted: Iterable[str], stored: Iterable[str]) -> str:
    """What the files put before the model's names: that under which most of them are found."""
    wanted, stored = list(wanted), set(stored)
    possible = {""} | {
        name.removesuffix(one) for one in wanted[:1] + wanted[-1:] for name in stored if name.endswith("." + one)
    }
    return max(sorted(possible), key=lambda prefix: sum(prefix + name in stored for name in wanted))


def _require(
    model: nn.Module, files: WeightFiles, missing: list[str], unknown: set[str], prefix: str, wanted: dict[str, str]
) -> None:
    tops = {name.partition(".")[0] for name in wanted.values()}
    # Other things that a checkpoint holds, such as optimiser state, lie below names that the model does not have.
    of_model = sorted(name for name in unknown if name.removeprefix(prefix).partition(".")[0] in tops)
    others = sorted({name.removeprefix(prefix).partition(".")[0] for name in unknown - set(of_model)})
    if missing or of_model:
        parts = []
        if missing:
            near = did_you_mean(wanted[missing[0]], [name.removeprefix(prefix) for name in unknown])
            parts.append(f"it has no {_some(missing)}{near if len(missing) == 1 else ''}")
        if of_model:
            parts.append(f"it has {_some(of_model)}, which the model has not")
        hint = "start_from(job, path, rename=..., new=...) in the job's file renames tensors and leaves some out"
        raise WeightsDoNotMatch(f"{files.path} is not of this {type(model).__name__}: {'; '.join(parts)}. {hint}")
    if others and not prefix:
        warnings.warn(f"{files.path} also holds {_some(others)}, which the model has not; left unread", stacklevel=2)


def _require_shapes(files: WeightFiles, targets: dict[str, Tensor]) -> None:
    wrong = []
    for name, target in targets.items():
        stored = files.tensors[name]
        if stored.shape != tuple(target.shape):
            wrong.append(f"{name} is {list(stored.shape)} there and {list(target.shape)} in the model")
        elif stored.dtype.is_floating_point != target.is_floating_point():
            wrong.append(f"{name} is {stored.dtype} there and {target.dtype} in the model")
    if wrong:
        raise WeightsDoNotMatch(f"{files.path} is of another model: {_some(wrong, '; ')}")


def _some(names: Iterable[str], between: str = ", ") -> str:
    names = list(names)
    return between.join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
