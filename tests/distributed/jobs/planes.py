"""Models with image planes, written as one writes them on one machine: for spatial parallelism.

A U-Net in the form in which it is usually published, on images of odd sizes; networks of Hugging Face; a volume, a
signal, and one with the norms, poolings and convolutions that the others lack. A third of the targets is not counted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData

BATCH, SAMPLES, CLASSES = 6, 30, 3
IGNORED = -100


class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class Up(nn.Module):
    """Twice as large, padded to the size of the skip, joined with it."""

    def __init__(self, inputs: int, outputs: int, *, bilinear: bool) -> None:
        super().__init__()
        self.up: nn.Module
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(inputs + outputs, outputs)
        else:
            self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
            self.conv = DoubleConv(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        high, wide = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
        return self.conv(torch.cat([skip, x], dim=1))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Classifies each pixel."""

    def __init__(self, *, bilinear: bool = False, width: int = 4) -> None:
        super().__init__()
        self.inc = DoubleConv(1, width)
        self.down1, self.down2 = DoubleConv(width, 2 * width), DoubleConv(2 * width, 4 * width)
        self.up1 = Up(4 * width, 2 * width, bilinear=bilinear)
        self.up2 = Up(2 * width, width, bilinear=bilinear)
        self.outc = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        return self.outc(self.up2(self.up1(c, b), a))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Norms over planes, dropout, dilated, grouped and strided convolutions, squeeze and excitation, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 5, stride=2, padding=2, padding_mode="reflect")
        self.groups, self.instance = nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)
        self.wide = nn.Conv2d(6, 6, 3, padding=4, dilation=4, groups=6)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.point = nn.Conv2d(6, 8, 1)
        self.last = nn.Linear(8 * 9, CLASSES)
        self.drop, self.channels = nn.Dropout(0.2), nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.groups(self.stem(x)))
        x = x + self.drop(self.instance(self.wide(x)))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = F.avg_pool2d(F.interpolate(x, scale_factor=1.5, mode="nearest"), 3, stride=2, padding=1, ceil_mode=True)
        x = self.channels(F.silu(self.point(x)))
        return self.last(F.adaptive_avg_pool2d(x, 3).flatten(1))  # type: ignore[no-any-return]


class Volume(nn.Module):
    """Classifies each voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4)
        self.two, self.up = nn.Conv3d(4, 6, 3, stride=2, padding=1), nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.out = nn.Conv3d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.leaky_relu(self.norm(self.one(x)))
        b = self.up(torch.tanh(self.two(F.max_pool3d(a, 3, 1, 1))))[:, :, : a.size(2), : a.size(3), : a.size(4)]
        return self.out(torch.cat([a, b], 1))  # type: ignore[no-any-return]


class Pyramid(nn.Module):
    """Reads a size at its beginning and resizes to it in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.deep, self.out = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.stem(x))
        height, width = a.shape[-2:]
        y = torch.tanh(self.deep(torch.tanh(self.down(a))))
        return F.interpolate(self.out(y), size=(height, width), mode="bilinear")


class Signal(nn.Module):
    """A one-dimensional residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 6, 7, stride=2, padding=3)
        self.convs = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=2**n, dilation=2**n, bias=False) for n in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(self.stem(x), 3, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + torch.relu(norm(conv(x)))
        return self.head(F.avg_pool1d(x, 2).mean(-1))  # type: ignore[no-any-return]


def by_pixel(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over every pixel, voxel or sample whose target counts."""
    target = batch["y"]
    return F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum"), (target != IGNORED).sum()


def make(name: str, model: Any, shape: tuple[int, ...], *, each: bool) -> Job:
    """`each`: every pixel has a target."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, *shape, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES, *(shape[1:] if each else ())), generator=generator)
    y = y.masked_fill(torch.rand(y.shape, generator=generator) < 0.3, IGNORED)
    return Job(
        name=name,
        model=model,
        train=TensorData(x=x, y=y),
        loss=by_pixel,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        clip=1.0,
        global_batch=BATCH,
        steps=10,
    )


def unet() -> Job:
    return make("unet", UNet, (1, 13, 11), each=True)


def unet_bilinear() -> Job:
    return make("unet-bilinear", partial(UNet, bilinear=True), (1, 14, 17), each=True)


def mixture() -> Job:
    return make("mixture", Mixture, (2, 17, 13), each=False)


def volume() -> Job:
    return make("volume", Volume, (1, 7, 6, 9), each=True)


def pyramid() -> Job:
    return make("pyramid", Pyramid, (1, 15, 13), each=True)


def signal() -> Job:
    return make("signal", Signal, (2, 75), each=False)


class Logits(nn.Module):
    """A classifier of Hugging Face, which returns more than logits."""

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        import transformers

        self.network = getattr(transformers, kind)(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(pixel_values=x).logits  # type: ignore[no-any-return]


def resnet() -> Job:
    from transformers import ResNetConfig

    config = ResNetConfig(
        num_channels=1,
        embedding_size=4,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_labels=CLASSES,
        layer_type="bottleneck",
    )
    return make("resnet", partial(Logits, config, "ResNetForImageClassification"), (1, 33, 30), each=False)


def convnext() -> Job:
    from transformers import ConvNextConfig

    config = ConvNextConfig(
        num_channels=1,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_stages=2,
        num_labels=CLASSES,
        patch_size=2,
    )
    return make("convnext", partial(Logits, config, "ConvNextForImageClassification"), (1, 22, 18), each=False)
