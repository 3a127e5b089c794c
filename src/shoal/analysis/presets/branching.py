"""GoogLeNet, ResNet-50 and DenseNet-121: networks whose blocks branch and join again. Shapes are those of torchvision,
whose parameter counts are the published ones.
"""

from __future__ import annotations

from shoal.analysis.network import Network
from shoal.analysis.presets.images import Features, ImageNetwork

INCEPTIONS = (
    ("3a", 64, 96, 128, 16, 32, 32),
    ("3b", 128, 128, 192, 32, 96, 64),
    ("pool",),
    ("4a", 192, 96, 208, 16, 48, 64),
    ("4b", 160, 112, 224, 24, 64, 64),
    ("4c", 128, 128, 256, 24, 64, 64),
    ("4d", 112, 144, 288, 32, 64, 64),
    ("4e", 256, 160, 320, 32, 128, 128),
    ("pool",),
    ("5a", 256, 160, 320, 32, 128, 128),
    ("5b", 384, 192, 384, 48, 128, 128),
)
"""Szegedy et al. 2014, table 1: channels of 1x1; of 3x3, reduced and then; of the second 3x3, likewise; of pooling."""


def googlenet(batch: int) -> Network:
    """With batch norm, and 3x3 where the paper has 5x5, as it was later trained; without auxiliary classifiers."""
    net = ImageNetwork("googlenet", batch)
    x = Features(layer=None, channels=3, side=224)
    net.begin("conv1")
    x = _unit(net, x, "conv1", 64, 7, stride=2)
    x = net.pooling(x, "conv1.pool", 3, stride=2, round_up=True)
    net.begin("conv2")
    x = _unit(net, x, "conv2", 64, 1)
    net.begin("conv3")
    x = _unit(net, x, "conv3", 192, 3)
    x = net.pooling(x, "conv3.pool", 3, stride=2, round_up=True)
    for row in INCEPTIONS:
        if row[0] == "pool":
            x = net.pooling(x, f"{net.builder.block}.pool", 2 if x.side == 14 else 3, stride=2, round_up=True)
        else:
            net.begin(f"inception{row[0]}")
            x = _inception(net, x, *(int(width) for width in row[1:]))
    x = net.pooling(x, f"{net.builder.block}.mean", x.side, stride=1)
    net.begin("fc")
    return net.finish(net.fully_connected(x, "fc", 1000))


def _inception(
    net: ImageNetwork, x: Features, one: int, to3: int, three: int, to5: int, five: int, pool: int
) -> Features:
    at = net.builder.block
    pooled = net.pooling(x, f"{at}.branch4.pool", 3, stride=1, padding=1)
    return net.join(
        [
            _unit(net, x, f"{at}.branch1", one, 1),
            _unit(net, _unit(net, x, f"{at}.branch2.0", to3, 1), f"{at}.branch2.1", three, 3),
            _unit(net, _unit(net, x, f"{at}.branch3.0", to5, 1), f"{at}.branch3.1", five, 3),
            _unit(net, pooled, f"{at}.branch4", pool, 1),
        ],
        f"{at}.join",
    )


def _unit(
    net: ImageNetwork, x: Features, name: str, channels: int, kernel: int, *, stride: int = 1, relu: bool = True
) -> Features:
    """A convolution with batch norm and ReLU behind it."""
    x = net.convolution(x, name, channels, kernel, stride=stride, bias=False)
    x = net.batch_norm(x, f"{name}.norm")
    return net.activation(x, f"{name}.relu") if relu else x


def resnet50(batch: int) -> Network:
    """He et al. 2015; the stride of a stage lies in the 3x3 of its first block."""
    net = ImageNetwork("resnet50", batch)
    net.begin("stem")
    x = _unit(net, Features(layer=None, channels=3, side=224), "stem", 64, 7, stride=2)
    x = net.pooling(x, "stem.pool", 3, stride=2, padding=1)
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            net.begin(f"stage{stage}.{block}")
            x = _bottleneck(net, x, width, stride=2 if stage > 1 and block == 0 else 1)
    x = net.pooling(x, f"{net.builder.block}.mean", x.side, stride=1)
    net.begin("fc")
    return net.finish(net.fully_connected(x, "fc", 1000))


def _bottleneck(net: ImageNetwork, x: Features, width: int, *, stride: int) -> Features:
    at, outputs = net.builder.block, 4 * width
    body = _unit(net, x, f"{at}.reduce", width, 1)
    body = _unit(net, body, f"{at}.middle", width, 3, stride=stride)
    body = _unit(net, body, f"{at}.expand", outputs, 1, relu=False)
    same = stride == 1 and x.channels == outputs
    shortcut = x if same else _unit(net, x, f"{at}.shortcut", outputs, 1, stride=stride, relu=False)
    return net.activation(net.add(body, shortcut, f"{at}.add"), f"{at}.relu")


def densenet121(batch: int, *, growth: int = 32) -> Network:
    """Huang et al. 2016: each layer reads all layers before it in its block."""
    net = ImageNetwork("densenet121", batch)
    net.begin("stem")
    x = _unit(net, Features(layer=None, channels=3, side=224), "stem", 64, 7, stride=2)
    x = net.pooling(x, "stem.pool", 3, stride=2, padding=1)
    stages = (6, 12, 24, 16)
    for stage, num in enumerate(stages, 1):
        for number in range(num):
            net.begin(f"dense{stage}.{number}")
            x = net.join([x, _dense_layer(net, x, growth)], f"{net.builder.block}.join")
        if stage < len(stages):
            net.begin(f"transition{stage}")
            x = net.activation(net.batch_norm(x, f"transition{stage}.norm"), f"transition{stage}.relu")
            x = net.convolution(x, f"transition{stage}", x.channels // 2, 1, bias=False)
            x = net.pooling(x, f"transition{stage}.pool", 2, stride=2)
    net.begin("head")
    x = net.activation(net.batch_norm(x, "head.norm"), "head.relu")
    x = net.pooling(x, "head.mean", x.side, stride=1)
    return net.finish(net.fully_connected(x, "head", 1000))


def _dense_layer(net: ImageNetwork, x: Features, growth: int) -> Features:
    at = net.builder.block
    inner = net.activation(net.batch_norm(x, f"{at}.norm1"), f"{at}.relu1")
    inner = net.convolution(inner, f"{at}.conv1", 4 * growth, 1, bias=False)
    inner = net.activation(net.batch_norm(inner, f"{at}.norm2"), f"{at}.relu2")
    return net.convolution(inner, f"{at}.conv2", growth, 3, bias=False)
