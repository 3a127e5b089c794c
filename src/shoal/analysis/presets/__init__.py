"""Known networks by name, as operators. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.analysis.network import Network
from shoal.analysis.presets.branching import densenet121, googlenet, resnet50
from shoal.analysis.presets.classic import alexnet, lenet, vgg16
from shoal.analysis.presets.transformers import network_of

if TYPE_CHECKING:
    from shoal.shapes.shape import Transformer

__all__ = ["IMAGE_NETWORKS", "is_preset", "network_of", "preset_names", "preset_network"]

IMAGE_NETWORKS: dict[str, Callable[[int], Network]] = {
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg16": vgg16,
    "googlenet": googlenet,
    "resnet50": resnet50,
    "densenet121": densenet121,
}

IMAGE_BATCH = 32
"""Where none is asked for. Transformers take one sequence."""


def preset_names() -> tuple[str, ...]:
    from shoal.shapes.presets import SHAPES

    return (*IMAGE_NETWORKS, *SHAPES)


def is_preset(name: str) -> bool:
    try:
        _transformer(name)
    except ValueError:
        return _image_name(name) in IMAGE_NETWORKS
    return True


def preset_network(name: str, *, batch: int | None = None) -> Network:
    """A known network at a batch. A name that is none raises ValueError, with the nearest that there is."""
    build = IMAGE_NETWORKS.get(_image_name(name))
    if build is not None:
        return build(IMAGE_BATCH if batch is None else batch)
    return network_of(_transformer(name), 1 if batch is None else batch)


def _image_name(name: str) -> str:
    """`VGG-16` and `resnet-50` are spelled in many ways."""
    return name.strip().lower().replace("-", "").replace("_", "")


def _transformer(name: str) -> Transformer:
    from shoal.shapes.presets import preset

    return preset(name)
