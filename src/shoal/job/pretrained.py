"""Models of the library transformers, from a configuration or with the weights of a folder on this machine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.utils import logging

from shoal.job.errors import JobError
from shoal.job.weights.files import weight_files
from shoal.job.weights.start import WeightsDoNotMatch, fill, has_memory

Kind = Literal["causal-lm", "text-classifier", "image-classifier"]

BUILDERS: dict[Kind, Any] = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "text-classifier": transformers.AutoModelForSequenceClassification,
    "image-classifier": transformers.AutoModelForImageClassification,
}


def build_from(kind: Kind, config: Any) -> nn.Module:
    model: nn.Module = BUILDERS[kind].from_config(copy.deepcopy(config))
    return model.float().train()


def pretrained_folder(path: str | Path) -> Path:
    """The folder, with weights in it that can be read without running code."""
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise JobError(
            f"from_transformers({str(path)!r}): there is no such folder. Nothing is fetched: save the model there "
            "first (save_pretrained, or `hf download NAME --local-dir FOLDER`)"
        )
    weight_files(folder, pickles=False)
    return folder


def config_of(folder: Path) -> Any:
    """The configuration in a folder; code in the folder is not run."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise JobError(
            f"{folder} has no configuration that transformers {transformers.__version__} knows: "
            f"{str(error).splitlines()[0]}"
        ) from error


class Pretrained:
    """Builds the model of a folder, with its weights."""

    def __init__(self, kind: Kind, config: Any, folder: Path, new: Sequence[str]) -> None:
        self.kind, self.config, self.folder, self.new = kind, config, folder, tuple(new)

    def __call__(self) -> nn.Module:
        # Where all tensors come from the folder no time is spent on drawing them. Ties are made with the start.
        with nullcontext() if self.new else no_init_weights():
            model: Any = build_from(self.kind, self.config)
        if not self.new:
            model.tie_weights()
        if has_memory(model):
            try:
                fill(model, weight_files(self.folder, pickles=False), new=self.new)
            except WeightsDoNotMatch as error:
                self._through_the_library(model, error)
        return cast(nn.Module, model)

    def _through_the_library(self, model: nn.Module, why: WeightsDoNotMatch) -> None:
        """Names in the folder that are not the model's: the library knows how they are converted (stacked experts, a
        base model without its head). It needs memory for all of it."""
        shows = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # Each rank would draw one.
        loaded, info = BUILDERS[self.kind].from_pretrained(
            self.folder,
            config=copy.deepcopy(self.config),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        if shows:
            logging.enable_progress_bar()
        wrong = [*info["missing_keys"], *(row[0] for row in info["mismatched_keys"])]
        kept = [name for name in wrong if any(fnmatchcase(name, pattern) for pattern in self.new)]
        if sorted(set(wrong) - set(kept)):
            raise why
        state = model.state_dict()
        with torch.no_grad():
            for name, values in loaded.state_dict().items():
                if name not in kept:
                    state[name].copy_(values)
