"""Builds the rehearsal device, once for each version of its source and of PyTorch.

The folder that holds the extension also holds its metadata: with that folder and `device/` on the path, PyTorch finds
the device by itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

DEVICE = Path(__file__).parent / "device"
SOURCE = DEVICE / "reef.cpp"
BUILT = Path(__file__).parent / "build"
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_reef"]
ENTRY_POINT = "[torch.backends]\nreef = reef:install\n"
METADATA = "Metadata-Version: 2.1\nName: reef\nVersion: 0\n"


class CannotBuild(RuntimeError):
    """The machine lacks what the extension is built with."""


def built() -> Path:
    """The folder of the extension, built if it is not there.

    Raises:
        CannotBuild: without a C++ compiler or Python's headers; the message says which.
    """
    known = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sysconfig.get_python_version().encode())
    folder = BUILT / known.hexdigest()[:16]
    if folder.exists():
        return folder
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild("there is no C++ compiler (g++, or the one that CXX names)")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise CannotBuild(f"Python's headers are not installed ({headers}/Python.h)")
    BUILT.mkdir(exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=BUILT))
    place = Path(torch.__file__).parent
    include = [f"-I{each}" for each in (place / "include", place / "include/torch/csrc/api/include", headers)]
    libraries = [f"-L{place / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", "-ltorch"]
    command = [compiler, *FLAGS, *include, str(SOURCE), "-o", str(partial / "_reef.so"), *libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise AssertionError(f"the rehearsal device does not compile:\n{done.stderr[-4000:]}")
        metadata = partial / "reef-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(METADATA)
        (metadata / "entry_points.txt").write_text(ENTRY_POINT)
        partial.rename(folder)  # Another session may have been faster; its folder is as good.
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def variables() -> dict[str, str]:
    """The environment in which PyTorch has the device."""
    paths = [str(built()), str(DEVICE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
