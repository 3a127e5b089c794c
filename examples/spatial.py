"""Images cut among ranks: a U-Net as one writes it on one machine, on images of an odd size.

shoal train examples/spatial.py --strategy "spatial(2)"
shoal verify examples/spatial.py --strategy "dp(2) * spatial(2)"
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job, TensorData


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Classifies each pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.dec2, self.dec1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        y = self.bottom(F.max_pool2d(b, 2))
        y = self.dec2(torch.cat([b, joined(self.up2(y), b)], 1))
        return self.head(self.dec1(torch.cat([a, joined(self.up1(y), a)], 1)))  # type: ignore[no-any-return]


def joined(x: Tensor, like: Tensor) -> Tensor:
    """Padded to the size of a skip."""
    return F.pad(x, [0, like.size(3) - x.size(3), 0, like.size(2) - x.size(2)])


def discs(samples: int, height: int = 49, width: int = 45) -> tuple[Tensor, Tensor]:
    """Noisy images of a disc, and which pixels lie in it."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)[None]
    centre = torch.rand(samples, 3, 1, 1, generator=generator)
    inside = (rows - centre[:, 0] * height) ** 2 + (columns - centre[:, 1] * width) ** 2 < (4 + 12 * centre[:, 2]) ** 2
    noise = torch.randn(samples, 1, height, width, generator=generator)
    return inside[:, None] + 0.5 * noise, inside.long()


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()


images, masks = discs(512)
job = Job(
    name="spatial",
    model=UNet,
    train=TensorData(x=images, y=masks),
    loss=loss,
    optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3),
    global_batch=8,
    steps=60,
)
