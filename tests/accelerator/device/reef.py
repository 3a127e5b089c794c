"""The rehearsal device in Python: registers `torch.device("reef")`, the module `torch.reef`, and its process group.

PyTorch calls `install` when it is imported, through an entry point of the group `torch.backends`; nothing in Shoal
names the device.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch


def install() -> None:
    if hasattr(torch, "reef"):
        return
    torch.utils.rename_privateuse1_backend("reef")
    import _reef  # The extension registers its kernels while it loads.

    module = _device_module(_reef)
    torch._register_device_module("reef", module)
    sys.modules["torch.reef"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    import reef_group

    reef_group.register()


def _device_module(extension: Any) -> types.ModuleType:
    """What `torch.cuda` is for CUDA, as far as PyTorch and these tests ask for it."""

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        given = None if device is None else torch.device(device).index
        return extension.current_device() if given is None else given

    def seed_all(seed: int) -> None:
        for number in range(extension.device_count()):
            extension.default_generator(number).manual_seed(int(seed))

    class device(contextlib.ContextDecorator):
        def __init__(self, which: Any) -> None:
            self.index = index(which)

        def __enter__(self) -> None:
            self.before = extension.current_device()
            if self.index >= 0:
                extension.set_device(self.index)

        def __exit__(self, *_: Any) -> None:
            extension.set_device(self.before)

    module = types.ModuleType("torch.reef")
    named = dict(
        is_available=lambda: extension.device_count() > 0,
        device_count=extension.device_count,
        current_device=extension.current_device,
        set_device=lambda which: extension.set_device(index(which)),
        is_initialized=extension.is_initialized,
        _is_in_bad_fork=extension.in_bad_fork,
        get_device_name=lambda which=None: "rehearsal device in host memory",
        synchronize=lambda which=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda *_, **__: True,
        manual_seed=lambda seed: extension.default_generator(index()).manual_seed(int(seed)) and None,
        manual_seed_all=seed_all,
        get_rng_state=lambda which=None: extension.default_generator(index(which)).get_state(),
        set_rng_state=lambda state, which=None: extension.default_generator(index(which)).set_state(state),
        memory_allocated=lambda which=None: extension.memory()[0],
        max_memory_allocated=lambda which=None: extension.memory()[1],
        reset_peak_memory_stats=lambda which=None: extension.reset_peak(),
        host_view=extension.host_view,
        waits=extension.waits,
        waits_are_errors=extension.waits_are_errors,
        Stream=torch.Stream,
        Event=torch.Event,
        device=device,
    )
    for name, value in named.items():
        setattr(module, name, value)
    return module
