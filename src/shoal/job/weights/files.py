"""Files that hold weights, with one face: which tensors there are, and reading them into tensors of a model.

Safetensors are read by ranges, and never copied where the model's tensor lies on the disk anyway. State dicts of
torch.save and torch.distributed.checkpoint folders contain pickles: only PyTorch's weights-only unpickler reads
them, which builds tensors, numbers and containers and calls nothing else.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.job.errors import JobError
from shoal.job.on_disk import is_on_disk, lying_in

CHUNK = 1 << 24
"""Bytes that are read at a time."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Types of a safetensors file."""
_ARRAY: Any = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
HARMLESS: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    type(np.dtype("uint32")),
    (_ARRAY, "numpy._core.multiarray._reconstruct"),
    (_ARRAY, "numpy.core.multiarray._reconstruct"),
]
"""What Megatron stores beside the weights: its arguments, and the states of generators. Building them runs nothing."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles(ABC):
    """One file or folder of weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}

    @abstractmethod
    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Copies tensors, by their names in the file, into tensors of the same shape."""


class Safetensors(WeightFiles):
    """One or several safetensors files."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        super().__init__(path)
        self._places: dict[str, tuple[Path, int, int]] = {}
        for file in files:
            for name, stored, start, stop in _header(file):
                self.tensors[name] = stored
                self._places[name] = (file, start, stop)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            if not self._lies_there(name, target):
                self._copy(name, target)

    def _lies_there(self, name: str, target: Tensor) -> bool:
        """Lets a tensor that lies on the disk lie in the file itself, if it is stored as it is used."""
        stored, (file, start, stop) = self.tensors[name], self._places[name]
        fits = stored.dtype == target.dtype and target.is_contiguous() and start % stored.dtype.itemsize == 0
        if not (fits and is_on_disk(target)):
            return False
        target.data = lying_in(str(file), start, stop - start).view(stored.dtype).view(target.shape)
        return True

    def _copy(self, name: str, target: Tensor) -> None:
        dtype, (file, start, stop) = self.tensors[name].dtype, self._places[name]
        flat = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=dtype)
        with open(file, "rb") as opened:
            for begin in range(start, stop, CHUNK):
                data = bytearray(os.pread(opened.fileno(), min(CHUNK, stop - begin), begin))
                values, first = torch.frombuffer(data, dtype=dtype), (begin - start) // dtype.itemsize
                flat[first : first + values.numel()].copy_(values)
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))


def _header(file: Path) -> Iterator[tuple[str, StoredTensor, int, int]]:
    """Name, shape, type and place of each tensor."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("its header does not fit into it")
            rows = json.loads(opened.read(length))
        for name, row in rows.items():
            if name == "__metadata__":
                continue
            if row["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the type {row['dtype']}; expected one of {', '.join(DTYPES)}")
            stored = StoredTensor(tuple(int(each) for each in row["shape"]), DTYPES[row["dtype"]])
            start, stop = (8 + length + int(each) for each in row["data_offsets"])
            if not 8 + length <= start <= stop <= size or stop - start != prod(stored.shape) * stored.dtype.itemsize:
                raise ValueError(f"{name} does not fit into it")
            yield name, stored, start, stop
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"{file} is no intact safetensors file: {error}") from error


class StateDict(WeightFiles):
    """Files of torch.save: a state_dict, or dictionaries around one, as DeepSpeed and Megatron write them."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        super().__init__(path)
        self._values: dict[str, Tensor] = {}
        for file in files:
            self._values |= dict(_flattened(_loaded(file)))
        self.tensors = {name: StoredTensor(tuple(value.shape), value.dtype) for name, value in self._values.items()}

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            target.copy_(self._values[name])
            _leave(self._values[name])


def _loaded(file: Path) -> Any:
    try:
        with torch.serialization.safe_globals(HARMLESS):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        what = str(error).partition("GLOBAL ")[2].partition(" ")[0] or "something else"
        raise JobError(
            f"{file} is read only as far as it holds tensors, numbers and containers, and it holds {what}, which could "
            "run code; if you trust it, save the model's state_dict alone as safetensors"
        ) from error


def _flattened(values: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(values, Tensor):
        yield prefix.rstrip("."), values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _flattened(value, f"{prefix}{key}.")


def _leave(tensor: Tensor) -> None:
    """Takes the pages of a tensor of a mapped file, which nothing has written to, out of this process."""
    import ctypes

    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    stop = (storage.data_ptr() + storage.nbytes()) // page * page
    if storage.is_shared() or storage.filename is None or stop <= start:
        return
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


class Distributed(WeightFiles):
    """A folder of torch.distributed.checkpoint, as FSDP2 jobs write it."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

        super().__init__(path)
        found = _metadata(path / ".metadata")

        class Reader(FileSystemReader):
            """The library's own reads this file by an unrestricted unpickler."""

            def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
                return found

        self._reader = Reader(path)
        for name, each in found.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                self.tensors[name] = StoredTensor(tuple(each.size), each.properties.dtype)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        import warnings

        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That no process group is there: each rank reads by itself.
            for name, target in targets.items():
                dcp.load({name: target.detach()}, storage_reader=self._reader, no_dist=True)


class _Passive(pickle.Unpickler):
    """Builds what the metadata of a checkpoint consist of, records without behaviour, and refuses any other name. (The
    weights-only unpickler of PyTorch does not know the protocol of these files.)"""

    RECORDS = (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
    )
    OTHERS = (
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    )

    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in self.OTHERS
        known |= module == "torch.distributed.checkpoint.metadata" and name in self.RECORDS
        known |= module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which could run code")
        return super().find_class(module, name)


def _metadata(file: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with open(file, "rb") as opened:
            found = _Passive(opened).load()
        if not isinstance(found, Metadata):
            raise TypeError(f"it holds a {type(found).__name__}")
        return found
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise JobError(f"{file} is not the metadata of a torch.distributed.checkpoint folder: {error}") from error


def weight_files(path: str | Path, *, pickles: bool = True) -> WeightFiles:
    """The weights at a path. Without `pickles` only safetensors are taken.

    Raises:
        JobError: There are none, or they cannot be read as weights alone.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix == ".safetensors":
            return Safetensors(place, [place])
        return StateDict(place, [place])
    if not place.is_dir():
        raise JobError(f"{place}: there is no such file or folder; weights are read from this machine only")
    place = _newest(place)
    if (place / ".metadata").is_file():
        return Distributed(place)
    if files := _listed(place, "model.safetensors.index.json") or sorted(place.glob("*.safetensors")):
        return Safetensors(place, files)
    found = _listed(place, "pytorch_model.bin.index.json") or sorted(place.glob("pytorch_model*.bin"))
    found = found or sorted([*place.glob("mp_rank_*_model_states.pt"), *place.glob("mp_rank_*/model_optim_rng.pt")])
    if not pickles and found:
        raise JobError(
            f"{place} holds weights as pickles only ({found[0].name}), which can run code when they are read; convert "
            "them: AutoModel....from_pretrained(FOLDER).save_pretrained(OTHER) writes safetensors"
        )
    split = sorted([*place.glob("zero_pp_rank_*_model_states.pt"), *(found if "mp_rank" in str(found[1:2]) else [])])
    if split:
        raise JobError(
            f"{place} holds a checkpoint in parts of several ranks ({split[0].relative_to(place)}, ...); consolidate "
            "it first, by DeepSpeed's zero_to_fp32.py or Megatron's tools/checkpoint/convert.py"
        )
    if found:
        return StateDict(place, found)
    raise JobError(
        f"{place} holds no weights; expected *.safetensors, pytorch_model*.bin, .metadata "
        "(torch.distributed.checkpoint), mp_rank_00_model_states.pt (DeepSpeed) or mp_rank_00/model_optim_rng.pt "
        "(Megatron)"
    )


def _newest(place: Path) -> Path:
    """The folder that the files of DeepSpeed and Megatron name as the newest checkpoint in a folder."""
    for file, pattern in (("latest", "{}"), ("latest_checkpointed_iteration.txt", "iter_{:0>7}")):
        if (place / file).is_file():
            inside = place / pattern.format((place / file).read_text().strip())
            if inside.is_dir():
                return inside
    return place


def _listed(place: Path, index: str) -> list[Path]:
    """The files that an index names."""
    if not (place / index).is_file():
        return []
    try:
        names = sorted(set(json.loads((place / index).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise JobError(f"{place / index} is no index of weights: {error}") from error
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not (place / name).is_file()]
    if outside or missing:
        raise JobError(f"{place / index} names {(outside or missing)[0]}, which is not a file of that folder")
    return [place / name for name in names]
