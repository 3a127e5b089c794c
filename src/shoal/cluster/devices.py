"""Accelerators as their datasheets describe them, with the fastest matrix product that was measured.

Peaks are dense (no sparsity). Measured rates are the "maximum achievable matmul" table of S. Bekman, ML Engineering
(compute/accelerator): the best of many shapes in bf16, at boost clocks and under the power limit. Names follow the
datasheets; `device` also finds a name by its nearest spelling.
"""

from __future__ import annotations

import re

from shoal.cluster.cluster import BadCluster, Device
from shoal.common.suggest import nearest_name

T, GB = 1e12, 1e9

WATTS = {
    "V100 SXM2 16GB": 300, "V100 SXM2 32GB": 300, "V100 SXM3 32GB (DGX-2)": 350, "A100 SXM4 40GB": 400,
    "A100 SXM4 80GB": 400, "A100 PCIe 40GB": 250, "H100 SXM5 80GB": 700, "H100 SXM5 96GB 500W": 500,
    "H100 PCIe 80GB": 350, "H200 SXM 141GB": 700, "B200 SXM": 1000, "GB200 (per GPU)": 1200,
    "MI250X (per GCD)": 280, "MI250X (whole OAM = 2 GCDs)": 560, "MI300X": 750, "L40S": 350, "A10G": 300, "T4": 70,
}  # fmt: skip
"""Board power at most (TDP), from the datasheets named with each device; of a GCD, half of its module's. An A10G can
be set to 150 to 300 W and is counted at its most."""


def _device(
    name: str, *, half: float, fp32: float, tf32: float | None = None, fp8: float | None = None, measured: float | None,
    memory_gb: float, memory_tb_s: float, sms: int, origin: str, bf16: bool = True, domain: int = 0,
) -> Device:  # fmt: skip
    peaks = {"fp32": fp32 * T, "fp16": half * T}
    if bf16:
        peaks["bf16"] = half * T
    if tf32:
        peaks["tf32"] = tf32 * T
    if fp8:
        peaks["fp8"] = fp8 * T
    matmul = {"bf16" if bf16 else "fp16": measured * T} if measured else {}
    return Device(
        name=name, peak_flops=peaks, matmul_flops=matmul, memory_bytes=memory_gb * GB,
        memory_bytes_per_s=memory_tb_s * T, sms=sms, origin=origin, domain=domain, watts=WATTS.get(name),
    )  # fmt: skip


# memory_gb: what a program sees of it, in units of 1e9 bytes (80 GB of HBM are 80 GiB less what the driver keeps).
DEVICES: tuple[Device, ...] = (
    _device("V100 SXM2 16GB", half=125, fp32=15.7, measured=None, memory_gb=16.9, memory_tb_s=0.9, sms=80, bf16=False,
            origin="NVIDIA V100 datasheet"),
    _device("V100 SXM2 32GB", half=125, fp32=15.7, measured=None, memory_gb=34.1, memory_tb_s=0.9, sms=80, bf16=False,
            origin="NVIDIA V100 datasheet"),
    _device("V100 SXM3 32GB (DGX-2)", half=125, fp32=15.7, measured=None, memory_gb=34.1, memory_tb_s=0.98, sms=80,
            bf16=False, origin="NVIDIA DGX-2 datasheet"),
    _device("A100 SXM4 40GB", half=312, fp32=19.5, tf32=156, measured=271.2, memory_gb=42.5, memory_tb_s=1.555, sms=108,
            origin="NVIDIA A100 datasheet; matmul: ML Engineering"),
    _device("A100 SXM4 80GB", half=312, fp32=19.5, tf32=156, measured=271.2, memory_gb=85.0, memory_tb_s=2.039, sms=108,
            origin="NVIDIA A100 datasheet; matmul: ML Engineering"),
    _device("A100 PCIe 40GB", half=312, fp32=19.5, tf32=156, measured=252.9, memory_gb=42.5, memory_tb_s=1.555, sms=108,
            origin="NVIDIA A100 datasheet; matmul: ML Engineering"),
    _device("A100 PCIe 80GB", half=312, fp32=19.5, tf32=156, measured=252.9, memory_gb=85.0, memory_tb_s=1.935, sms=108,
            origin="NVIDIA A100 datasheet; matmul: as the part of 40 GB"),
    _device("H100 SXM5 80GB", half=989, fp32=67, tf32=494.5, fp8=1979, measured=794.5, memory_gb=85.0, memory_tb_s=3.35,
            sms=132, origin="NVIDIA H100 datasheet; matmul: ML Engineering"),
    _device("H100 SXM5 96GB 500W", half=989, fp32=67, tf32=494.5, fp8=1979, measured=710.0, memory_gb=102.0,
            memory_tb_s=2.4, sms=132,
            origin="torchtitan's report (96 GB HBM2e, 2.4 TB/s, 500 W); matmul: 794.5 by the cube root of the power"),
    _device("H100 PCIe 80GB", half=756, fp32=51, tf32=378, fp8=1513, measured=None, memory_gb=85.0, memory_tb_s=2.0,
            sms=114, origin="NVIDIA H100 datasheet"),
    _device("H20 SXM 96GB", half=148, fp32=44, tf32=74, fp8=296, measured=None, memory_gb=102.0, memory_tb_s=4.0,
            sms=78, origin="NVIDIA H20 datasheet"),
    _device("GH200 96GB", half=989, fp32=67, tf32=494.5, fp8=1979, measured=794.5, memory_gb=102.0, memory_tb_s=4.0,
            sms=132, origin="NVIDIA GH200 datasheet; matmul: as H100"),
    _device("H200 SXM 141GB", half=989, fp32=67, tf32=494.5, fp8=1979, measured=794.5, memory_gb=150.0, memory_tb_s=4.8,
            sms=132, origin="NVIDIA H200 datasheet; matmul: as H100"),
    _device("B200 SXM", half=2250, fp32=80, tf32=1125, fp8=4500, measured=1745, memory_gb=192.0, memory_tb_s=8.0,
            sms=148, origin="NVIDIA B200 datasheet; matmul: ML Engineering"),
    _device("GB200 (per GPU)", half=2500, fp32=80, tf32=1250, fp8=5000, measured=1822, memory_gb=199.0, memory_tb_s=8.0,
            sms=152, domain=72, origin="NVIDIA GB200 NVL72 datasheet; matmul: ML Engineering"),
    _device("B300 SXM", half=2250, fp32=80, tf32=1125, fp8=4500, measured=1769, memory_gb=288.0, memory_tb_s=8.0,
            sms=148, origin="NVIDIA B300 datasheet; matmul: ML Engineering"),
    _device("GB300 (per GPU)", half=2500, fp32=80, tf32=1250, fp8=5000, measured=1822, memory_gb=288.0, memory_tb_s=8.0,
            sms=152, domain=72, origin="NVIDIA GB300 NVL72 datasheet; matmul: as GB200"),
    _device("MI250X (per GCD)", half=191.5, fp32=23.95, measured=147.0, memory_gb=68.7, memory_tb_s=1.6, sms=110,
            origin="AMD MI250X datasheet, half a module; matmul: ML Engineering (147 of 191.5)"),
    _device("MI250X (whole OAM = 2 GCDs)", half=383, fp32=47.9, measured=294.0, memory_gb=137.0, memory_tb_s=3.28,
            sms=220, origin="AMD MI250X datasheet; matmul: two dies"),
    _device("MI300X", half=1307, fp32=163.4, tf32=653.7, fp8=2614, measured=668.4, memory_gb=206.0, memory_tb_s=5.3,
            sms=304, origin="AMD MI300X datasheet; matmul: ML Engineering"),
    _device("MI325X", half=1307, fp32=163.4, tf32=653.7, fp8=2614, measured=668.4, memory_gb=275.0, memory_tb_s=6.0,
            sms=304, origin="AMD MI325X datasheet; matmul: as MI300X"),
    _device("MI355X", half=2516, fp32=157.3, fp8=5033, measured=1290, memory_gb=309.0, memory_tb_s=8.0, sms=256,
            origin="AMD MI355X datasheet; matmul: MI300X's part of its peak"),
    _device("L40S", half=362, fp32=91.6, tf32=183, fp8=733, measured=None, memory_gb=51.5, memory_tb_s=0.864, sms=142,
            origin="NVIDIA L40S datasheet"),
    _device("L4", half=121, fp32=30.3, tf32=60, fp8=242, measured=None, memory_gb=25.8, memory_tb_s=0.3, sms=58,
            origin="NVIDIA L4 datasheet"),
    _device("A40", half=149.7, fp32=37.4, tf32=74.8, measured=None, memory_gb=51.5, memory_tb_s=0.696, sms=84,
            origin="NVIDIA A40 datasheet"),
    _device("RTX A6000", half=154.8, fp32=38.7, tf32=77.4, measured=None, memory_gb=51.5, memory_tb_s=0.768, sms=84,
            origin="NVIDIA RTX A6000 datasheet"),
    _device("RTX 3090", half=71, fp32=35.6, tf32=35.6, measured=None, memory_gb=25.8, memory_tb_s=0.936, sms=82,
            origin="NVIDIA GA102 white paper"),
    _device("RTX 4090", half=165, fp32=82.6, tf32=82.6, fp8=330, measured=None, memory_gb=25.8, memory_tb_s=1.008,
            sms=128, origin="NVIDIA AD102 white paper"),
    _device("A10", half=125, fp32=31.2, tf32=62.5, measured=None, memory_gb=25.8, memory_tb_s=0.6, sms=72,
            origin="NVIDIA A10 datasheet"),
    _device("A10G", half=70, fp32=31.2, tf32=35, measured=None, memory_gb=25.8, memory_tb_s=0.6, sms=80,
            origin="NVIDIA A10G datasheet, as Amazon EC2 G5 has it"),
    _device("T4", half=65, fp32=8.1, measured=None, memory_gb=17.2, memory_tb_s=0.32, sms=40, bf16=False,
            origin="NVIDIA T4 datasheet"),
)  # fmt: skip

_CUT_LINKS = {"a800": "a100", "h800": "h100"}
"""Parts sold with narrower links; their products are those of the full part."""
_VENDORS = re.compile(r"\b(nvidia|amd|tesla|instinct|geforce|quadro|gpu)\b")


def device(name: str) -> Device:
    """A device by name: exactly, without regard to case and punctuation, or by its nearest spelling."""
    known = {_folded(each.name): each for each in DEVICES}
    plain = " ".join(_VENDORS.sub(" ", name.lower()).split())
    for cut, full in _CUT_LINKS.items():
        plain = plain.replace(cut, full)
    wanted = _folded(plain)
    if wanted in known:
        return known[wanted]
    family = re.match(r"(?:rtx )?([a-z]*\d+[a-z]*)", plain)
    if family:
        same = [each for each in DEVICES if family.group(1) in each.name.lower().split()]
        same = same or [each for each in DEVICES if each.name.lower().startswith(family.group(1))]
        wanted_memory = re.search(r"(\d+)\s*gi?b?\b", plain)
        sized = [each for each in same if wanted_memory and f" {wanted_memory.group(1)}gb" in each.name.lower()]
        if same:
            return _preferred(sized or same, by_bus="pcie" in plain, half="gcd" in plain)
    near = nearest_name(wanted, known, near=0.75)
    if near is not None:
        return known[near]
    raise BadCluster(f"no device is called {name!r}; known are {', '.join(each.name for each in DEVICES)}")


def _preferred(same: list[Device], *, by_bus: bool, half: bool) -> Device:
    """Of several parts of one name the largest on a module, which is what clusters are built of, by default."""
    return min(same, key=lambda each: (("PCIe" in each.name) != by_bus, "500W" in each.name,
                                       ("per GCD" in each.name) != half, -each.memory_bytes))  # fmt: skip


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
