"""LeNet-5, AlexNet and VGG: chains of convolutions with fully connected layers on top. Each layer with weights is a
block, together with the activation and pooling behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.analysis.network import Network
from shoal.analysis.presets.images import Features, ImageNetwork

ALEXNET = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
"""Channels, kernel, stride and padding of each convolution, and whether a pooling follows."""

VGG16_STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


def lenet(batch: int) -> Network:
    """LeCun et al. 1998, on 32 x 32 (28 x 28 with a border of two), the second convolution reading all maps."""
    net = ImageNetwork("lenet", batch)
    x = Features(layer=None, channels=1, side=28)
    for name, channels, padding in (("conv1", 6, 2), ("conv2", 16, 0)):
        net.begin(name)
        x = net.activation(net.convolution(x, name, channels, 5, padding=padding), f"{name}.tanh", "tanh")
        x = net.pooling(x, f"{name}.pool", 2, stride=2)
    return net.finish(_dense(net, x, (120, 84), classes=10, function="tanh"))


def alexnet(batch: int) -> Network:
    """Krizhevsky 2014, one column: torchvision's network."""
    net = ImageNetwork("alexnet", batch)
    x = Features(layer=None, channels=3, side=224)
    for number, (channels, kernel, stride, padding, pooled) in enumerate(ALEXNET, 1):
        name = f"conv{number}"
        net.begin(name)
        x = net.convolution(x, name, channels, kernel, stride=stride, padding=padding)
        x = net.activation(x, f"{name}.relu")
        if pooled:
            x = net.pooling(x, f"{name}.pool", 3, stride=2)
    return net.finish(_dense(net, x, (4096, 4096), classes=1000))


def vgg16(batch: int) -> Network:
    """Simonyan & Zisserman 2014, configuration D."""
    return vgg("vgg16", batch, stages=VGG16_STAGES, fully_connected=(4096, 4096), classes=1000, side=224, channels=3)


def vgg(
    name: str,
    batch: int,
    *,
    stages: Sequence[tuple[int, int]],
    fully_connected: Sequence[int],
    classes: int,
    side: int,
    channels: int,
    batch_norm: bool = False,
) -> Network:
    """`stages` lists (number of convolutions, their channels); a pooling that halves the image ends each stage."""
    net = ImageNetwork(name, batch)
    x = Features(layer=None, channels=channels, side=side)
    for stage, (num, width) in enumerate(stages, 1):
        for number in range(1, num + 1):
            name = f"conv{stage}_{number}"
            net.begin(name)
            x = net.convolution(x, name, width, 3, bias=not batch_norm)
            if batch_norm:
                x = net.batch_norm(x, f"{name}.norm")
            x = net.activation(x, f"{name}.relu")
        x = net.pooling(x, f"{name}.pool", 2, stride=2)
    return net.finish(_dense(net, x, fully_connected, classes=classes))


def _dense(net: ImageNetwork, x: Features, widths: Sequence[int], *, classes: int, function: str = "relu") -> Features:
    for number, width in enumerate((*widths, classes), 1):
        name = f"fc{number}"
        net.begin(name)
        x = net.fully_connected(x, name, width)
        if number <= len(widths):
            x = net.activation(x, f"{name}.{function}", function)
    return x
