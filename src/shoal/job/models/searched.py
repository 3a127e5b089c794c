"""A small convolutional network whose layers are given one by one: what the image space searches over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Layer = Callable[[int], nn.Module]
"""Builds a layer of so many channels, which it takes and returns."""


def normed(inputs: int, outputs: int, kernel: int, *, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class Residual(nn.Module):
    """A convolution and a way around it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = normed(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(x)


LAYERS: dict[str, Layer] = {
    "conv3": lambda channels: normed(channels, channels, 3),
    "conv5": lambda channels: normed(channels, channels, 5),
    "separable": lambda channels: nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False), normed(channels, channels, 1)
    ),
    "residual": Residual,
    "skip": lambda channels: nn.Identity(),
}


class SearchedNet(nn.Module):
    """Images [B, C, size, size] to logits [B, classes]. Each stage widens the channels, has its layers, and halves the
    image."""

    def __init__(
        self, *, stages: Sequence[tuple[int, Sequence[Callable[[], nn.Module]]]], classes: int, channels: int = 1
    ) -> None:
        """`stages` lists (channels, its layers)."""
        super().__init__()
        body: list[nn.Module] = []
        for width, layers in stages:
            body += [normed(channels, width, 3), *(build() for build in layers), nn.MaxPool2d(2)]
            channels = width
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))
