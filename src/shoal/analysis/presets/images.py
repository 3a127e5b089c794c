"""A builder of networks on images: it follows channels and sides from layer to layer, so that a preset is written the
way its paper describes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.analysis.convolution import Convolution
from shoal.analysis.elementwise import Activation, Add, Concatenation
from shoal.analysis.network import Network, NetworkBuilder
from shoal.analysis.products import FullyConnected
from shoal.analysis.reductions import BatchNorm, Loss, Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What a layer gives to the next: square images of some channels. Numbers without an image have side 1."""

    layer: int | None
    channels: int
    side: int

    @property
    def size(self) -> int:
        return self.channels * self.side**2


class ImageNetwork:
    """Each method adds a layer and returns what it gives."""

    def __init__(self, name: str, samples: int) -> None:
        self.samples = samples
        self.builder = NetworkBuilder(name=name, batch=samples)

    def begin(self, block: str) -> None:
        """Layers from here on belong to this block; an empty name makes each layer with weights a block of its own."""
        self.builder.block = block

    def convolution(
        self,
        x: Features,
        name: str,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        bias: bool = True,
    ) -> Features:
        """Without `padding` as much as keeps the image's side at stride 1."""
        operator = Convolution(
            samples=self.samples,
            in_channels=x.channels,
            out_channels=channels,
            image=(x.side, x.side),
            kernel=(kernel, kernel),
            stride=(stride, stride),
            padding=(kernel // 2 if padding is None else padding,) * 2,
            dilation=(1, 1),
            bias=bias,
        )
        layer = self.builder.add(name, operator, x.layer)
        return Features(layer=layer, channels=channels, side=operator.output[0])

    def batch_norm(self, x: Features, name: str) -> Features:
        operator = BatchNorm(samples=self.samples, channels=x.channels, image=(x.side, x.side))
        return Features(layer=self.builder.add(name, operator, x.layer), channels=x.channels, side=x.side)

    def activation(self, x: Features, name: str, function: str = "relu") -> Features:
        operator = Activation(function=function, elements=self.samples * x.size)
        return Features(layer=self.builder.add(name, operator, x.layer), channels=x.channels, side=x.side)

    def pooling(
        self, x: Features, name: str, kernel: int, *, stride: int, padding: int = 0, round_up: bool = False
    ) -> Features:
        reach = x.side + 2 * padding - kernel
        side = (-(-reach // stride) if round_up else reach // stride) + 1
        operator = Pooling(
            samples=self.samples,
            channels=x.channels,
            image=(x.side, x.side),
            output=(side, side),
            kernel=(kernel, kernel),
        )
        return Features(layer=self.builder.add(name, operator, x.layer), channels=x.channels, side=side)

    def fully_connected(self, x: Features, name: str, outputs: int) -> Features:
        operator = FullyConnected(rows=self.samples, inputs=x.size, outputs=outputs)
        return Features(layer=self.builder.add(name, operator, x.layer), channels=outputs, side=1)

    def add(self, x: Features, y: Features, name: str) -> Features:
        operator = Add(elements=self.samples * x.size)
        return Features(layer=self.builder.add(name, operator, x.layer, y.layer), channels=x.channels, side=x.side)

    def join(self, parts: list[Features], name: str) -> Features:
        """Channels side by side."""
        channels = sum(part.channels for part in parts)
        operator = Concatenation(elements=self.samples * channels * parts[0].side ** 2)
        layer = self.builder.add(name, operator, *(part.layer for part in parts))
        return Features(layer=layer, channels=channels, side=parts[0].side)

    def finish(self, logits: Features) -> Network:
        self.begin("loss")
        self.builder.add("loss", Loss(rows=self.samples, width=logits.channels), logits.layer)
        return self.builder.network()
