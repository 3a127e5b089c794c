"""A VGG: stages of 3x3 convolutions, each stage closed by a pooling that halves the image, and fully
connected layers on top. With batch norm the convolutions carry no bias, since the norm would cancel it.
With `batch_norm=False` it is the network of Simonyan & Zisserman 2014, to the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class VGG(nn.Module):
    """Images [B, C, size, size] to logits [B, classes]."""

    def __init__(
        self,
        *,
        stages: Sequence[tuple[int, int]],
        fully_connected: Sequence[int],
        classes: int,
        image: int,
        channels: int = 1,
        batch_norm: bool = True,
        dropout: float = 0.0,
    ) -> None:
        """`stages` lists (number of convolutions, their channels)."""
        super().__init__()
        final = image >> len(stages)
        if final < 1:
            raise ValueError(f"{len(stages)} stages halve an image of {image} pixels to nothing; use fewer stages")
        layers: list[nn.Module] = []
        for num_convolutions, width in stages:
            for _ in range(num_convolutions):
                layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=not batch_norm))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU())
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        dense: list[nn.Module] = [nn.Flatten()]
        features = channels * final * final
        for width in fully_connected:
            dense += [nn.Linear(features, width), nn.ReLU()]
            if dropout > 0:
                dense.append(nn.Dropout(dropout))
            features = width
        self.classifier = nn.Sequential(*dense, nn.Linear(features, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))
