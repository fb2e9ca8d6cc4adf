"""Pixels: a small U-Net, and images of shapes in noise with a class and a brightness for each pixel."""

import torch
from torch import Tensor, nn

SIDE = 16
UNLABELLED = 255


class UNet(nn.Module):
    """Two resolutions and one skip connection; `outputs` numbers for each pixel.

    >>> UNet(2)(torch.zeros(3, 1, 16, 16)).shape
    torch.Size([3, 2, 16, 16])
    """

    def __init__(self, outputs: int, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, width, 3, padding=1)
        self.deep = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers of each pixel (n, outputs, h, w) of images (n, 1, h, w)."""
        fine = torch.relu(self.down(x))
        coarse = torch.relu(self.deep(nn.functional.max_pool2d(fine, 2)))
        both = torch.cat([fine, torch.relu(self.up(coarse))], 1)
        pixels: Tensor = self.head(torch.relu(self.join(both)))
        return pixels


def unet() -> nn.Module:
    """A U-Net with three numbers per pixel: ``onebasin sample onebasin.examples:unet shapes.npz --ignore-index 255``.

    >>> unet()(torch.zeros(2, 1, 16, 16)).shape
    torch.Size([2, 3, 16, 16])
    """
    return UNet(3)


def shapes(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images of a disc and a larger, darker square in noise, the class of each pixel, and its brightness.

    Classes are 0 for background, 1 for the disc, 2 for the square. The first row of pixels is not labelled: its class
    is 255 and its brightness NaN.

    >>> [tuple(part.shape) for part in shapes(5)]
    [(5, 1, 16, 16), (5, 16, 16), (5, 16, 16)]

    Args:
        count: images.
        seed: of places, brightness and noise.

    Returns:
        Images (count, 1, 16, 16), classes (count, 16, 16), brightness (count, 16, 16).
    """
    generator = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    centre = torch.randint(4, SIDE - 4, (2, 2, count, 1, 1), generator=generator)
    disc = (row - centre[0, 0]).square() + (column - centre[0, 1]).square() <= 9
    square = torch.maximum((row - centre[1, 0]).abs(), (column - centre[1, 1]).abs()) <= 3
    classes = torch.where(disc, 1, torch.where(square, 2, 0))
    bright = torch.rand(2, count, 1, 1, generator=generator)
    level = torch.where(disc, 2 + bright[0], torch.where(square, 1 + bright[1], 0.5))
    images = (level + 0.3 * torch.randn(count, SIDE, SIDE, generator=generator))[:, None]
    classes[:, 0], level[:, 0] = UNLABELLED, torch.nan
    return images, classes, level
