"""What `shoal doctor` finds out: facts of the machine, in a process of their own, and which strategies to try on it."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

EXPERTS = str(Path(__file__).with_name("doctor_job.py"))
LANGUAGE, IMAGES = "language:tiny", "image:tiny"
PACKAGES = ("torch", "numpy", "transformers", "safetensors", "cryptography", "ray")
PROGRAMS = ("torchrun", "srun", "sbatch", "mpirun", "kubectl", "ray", "nvidia-smi")
VARIABLES = ("SHOAL_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_VISIBLE", "TORCH_", "PYTORCH_", "TMPDIR")
FEW_FILES = 4096
"""Open files below which jobs of some hundred ranks a host run out of connections."""

AXES: tuple[tuple[str, int, str, str], ...] = (
    ("dp", 2, LANGUAGE, "dp(2)"),
    ("dp, ZeRO 1", 2, LANGUAGE, "dp(2, zero=1)"),
    ("dp, ZeRO 3", 2, LANGUAGE, "dp(2, zero=3) * accumulate(2)"),
    ("tp", 2, LANGUAGE, "tp(2, sequence=True)"),
    ("pp", 2, LANGUAGE, "pp(2, '1f1b', micro=2)"),
    ("cp, ring", 2, LANGUAGE, "cp(2, 'ring')"),
    ("ep", 2, EXPERTS, "ep(2)"),
    ("spatial", 2, IMAGES, "spatial(2)"),
    ("recompute", 2, LANGUAGE, "dp(2) * recompute('full')"),
    ("islands", 2, LANGUAGE, "dp(2, sync=local(2))"),
    ("shared memory", 2, LANGUAGE, "dp(2, via=shared())"),
    ("cp, Ulysses", 2, LANGUAGE, "cp(2, 'ulysses')"),
    ("dp * tp", 4, LANGUAGE, "dp(2, zero=3) * tp(2)"),
    ("pp * dp", 4, LANGUAGE, "pp(2, '1f1b', micro=2) * dp(2, zero=1)"),
)
"""Name, ranks, job and strategy of each part of the self-test; the most telling ones first."""
HOST_ONLY = ("shared memory",)
"""What does not run on accelerators."""


def facts(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """In a process of its own, since a process that has asked for a device may not fork afterwards on some."""
    import psutil
    import torch

    import shoal
    from shoal.comm.group import accelerator_backend

    memory = psutil.virtual_memory()
    machine = {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": _processor(),
        "cores": f"{os.cpu_count()}, {len(os.sched_getaffinity(0))} for this process",
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB free; control group: {_group()}",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name))),
        "build of torch": f"{torch.__version__}, CUDA {torch.version.cuda}, threads {torch.get_num_threads()}",
        "launchers": ", ".join(name for name in PROGRAMS if shutil.which(name)) or "none",
    }
    limits, advice = _limits()
    found = accelerator_backend()
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = _devices(count)
    links = {
        "interfaces": _interfaces(),
        "zero-copy": "yes" if _reads_peers() else "no: large messages of a host are copied twice (ptrace, seccomp)",
        "backends": ", ".join(["shoal", "gloo", *([found[0]] if found is not None else [])]),
    }
    if count and found is None:
        advice.append(f"PyTorch has no collectives for {devices.get('device 0', '')}: ranks compute in host memory")
    variables = {
        name: "(set)" if "TOKEN" in name or "KEY" in name else value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES)
    }
    for own in ("SHOAL_RENDEZVOUS", "SHOAL_HANG_AFTER_S", "SHOAL_TOKEN", "SHOAL_LOST"):
        variables.pop(own, None)  # Of this very process.
    sections = {"machine": machine, "devices": devices, "links": links, "limits": limits, "variables": variables}
    return {"sections": sections, "advice": advice, "devices": count if found is not None else 0}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _group() -> str:
    with contextlib.suppress(OSError):
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return f"{int(text) / 1e9:.1f} GB" if text.isdecimal() else "none"
    return "unknown"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _limits() -> tuple[dict[str, str], list[str]]:
    from shoal.job.on_disk import folder_for_tensors

    advice = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < FEW_FILES:
        advice.append(f"at most {hard} open files: raise the limit (ulimit -Hn) for jobs of many ranks a host")
    folder = folder_for_tensors()
    kind, free = _file_system(folder), shutil.disk_usage(folder).free
    if kind in ("tmpfs", "ramfs"):
        advice.append(f"{folder} is in memory: models built on the disk save nothing there; set TMPDIR to a disk")
    shown = {
        "open files": f"{soft}, up to {hard}",
        "processes": str(resource.getrlimit(resource.RLIMIT_NPROC)[0]).replace("-1", "no limit"),
        "locked memory": str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]).replace("-1", "no limit"),
        "files of tensors": f"{folder} ({kind}), {free / 1e9:.0f} GB free",
        "runs": f"{Path.cwd()} ({_file_system(Path.cwd())}), {shutil.disk_usage('.').free / 1e9:.0f} GB free",
    }
    with contextlib.suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
        shown["/dev/shm"] = f"{shm.total / 1e9:.2f} GB, {shm.free / 1e9:.2f} GB free (for NCCL; Shoal needs none)"
    try:
        os.close(os.memfd_create("shoal-doctor"))
        shown["shared memory"] = "yes (memfd)"
    except OSError as error:
        shown["shared memory"] = f"no: {error.strerror}"
        advice.append("shared memory without a name (memfd) is not permitted here: ranks of one host cannot link up")
    return shown, advice


def _file_system(folder: Path) -> str:
    import psutil

    found = [each for each in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(each.mountpoint)]
    return max(found, key=lambda each: len(each.mountpoint)).fstype if found else "unknown"


def _interfaces() -> str:
    import psutil

    stats = psutil.net_if_stats()
    return ", ".join(
        f"{name} {'up' if each.isup else 'down'}" + (f" {each.speed} Mb/s" if each.speed else "")
        for name, each in sorted(stats.items())
    )


def _reads_peers() -> bool:
    """Whether another process, a child of this one, can read this one's memory."""
    import ctypes
    import socket

    from shoal.comm.transport.peer_memory import PeerMemory

    mine, other = socket.socketpair()
    with mine, other:
        word = ctypes.c_uint64(0x51)
        child = os.fork()
        if child == 0:
            os._exit(0 if PeerMemory(mine).shows(ctypes.addressof(word), 0x51) else 1)
        return os.waitpid(child, 0)[1] == 0


def _devices(count: int) -> dict[str, str]:
    """Each device, which pairs reach each other's memory, and what the vendor's own tool prints of the links."""
    import torch

    if not count:
        return {"devices": "none: ranks compute in host memory"}
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    shown: dict[str, str] = {}
    for number in range(count):
        properties = module.get_device_properties(number) if hasattr(module, "get_device_properties") else None
        shown[f"device {number}"] = str(properties or torch.accelerator.current_accelerator())
    if torch.cuda.is_available():
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        reach = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        shown["peer access"] = f"{reach} of {len(pairs)} pairs"
        shown["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
            shown["topology"] = "\n" + done.stdout.rstrip()
    return shown
