"""A ResNet with batch norm (He et al. 2015): basic blocks for small images, bottlenecks for the real shape.
The stem is either one 3x3 convolution, for images of a few dozen pixels, or the 7x7 with pooling of the
original.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class ResidualBlock(nn.Module):
    """body(x) + shortcut(x), then ReLU. The shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _block(inputs: int, width: int, stride: int, bottleneck: bool) -> ResidualBlock:
    outputs = 4 * width if bottleneck else width
    if bottleneck:
        body = nn.Sequential(
            _conv_norm(inputs, width, 1),
            nn.ReLU(),
            _conv_norm(width, width, 3, stride),
            nn.ReLU(),
            _conv_norm(width, outputs, 1),
        )
    else:
        body = nn.Sequential(_conv_norm(inputs, width, 3, stride), nn.ReLU(), _conv_norm(width, width, 3))
    same = stride == 1 and inputs == outputs
    return ResidualBlock(body, nn.Identity() if same else _conv_norm(inputs, outputs, 1, stride))


class ResNet(nn.Module):
    """Images [B, C, size, size] to logits [B, classes]."""

    def __init__(
        self,
        *,
        blocks: Sequence[int],
        widths: Sequence[int],
        classes: int,
        channels: int = 1,
        bottleneck: bool = False,
        large_stem: bool = False,
    ) -> None:
        """`blocks` and `widths` give each stage's number of blocks and channels; every stage but the first
        halves the image.
        """
        super().__init__()
        if len(blocks) != len(widths) or not blocks:
            raise ValueError(f"blocks {list(blocks)} and widths {list(widths)} must name the same stages, at least one")
        features = widths[0]
        stem: list[nn.Module] = [
            _conv_norm(channels, features, 7, 2) if large_stem else _conv_norm(channels, features, 3),
            nn.ReLU(),
        ]
        if large_stem:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)
        stages = []
        for stage, (num_blocks, width) in enumerate(zip(blocks, widths, strict=True)):
            row = []
            for block in range(num_blocks):
                row.append(_block(features, width, 2 if stage > 0 and block == 0 else 1, bottleneck))
                features = 4 * width if bottleneck else width
            stages.append(nn.Sequential(*row))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))
