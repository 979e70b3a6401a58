"""Random changes of colour for whole batches of images in 0..255, on any device.

No step waits for the device, and none loops over images.
"""

from functools import cache

import torch
from torch import Tensor

# Standard deviations and directions (columns) of ImageNet's colours in 0..1, from AlexNet's
# recipe as published with fb.resnet.torch.
LIGHTING_VALUES = (0.2175, 0.0188, 0.0045)
LIGHTING_VECTORS = (
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)


def random_jitter(images_BCHW: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Changes brightness, contrast and saturation of each image by random factors of its own.

    Args:
        images_BCHW: uint8 or float, in 0..255; the result is float.
        strength: factors are uniform in 1 - strength .. 1 + strength, and never negative.
        generator: on the device of the images.
    """
    shape, device = (len(images_BCHW), 3), images_BCHW.device
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = torch.rand(shape, generator=generator, device=device) * (high - low) + low
    return jitter(images_BCHW, factors)


def jitter(images_BCHW: Tensor, factors_B3: Tensor) -> Tensor:
    """Changes brightness, contrast and saturation of each image.

    Each mixes the image with something grey: black, its mean, or its own grey version. As in
    fb.resnet.torch, and unlike in torchvision, nothing is clipped at black and white. The three
    are linear then and their order makes no difference, so they are done in one go.

    Args:
        images_BCHW: uint8 or float, in 0..255; the result is float.
        factors_B3: of brightness, contrast and saturation; 1 changes nothing.
    """
    brightness, contrast, saturation = factors_B3[:, :, None, None, None].unbind(dim=1)
    images = images_BCHW.to(torch.float32, copy=True)  # one copy, changed in place: memory is slow
    grey = to_grey(images)
    mean = grey.mean(dim=(2, 3), keepdim=True)
    rest = grey.mul_(brightness * contrast * (1 - saturation)).add_(
        brightness * (1 - contrast) * mean
    )
    return torch.addcmul(rest, images, brightness * contrast * saturation, out=images)


def to_grey(images_BCHW: Tensor) -> Tensor:
    """Brightness as the eye sees it (ITU-R 601), as images_B1HW; takes floats."""
    red, green, blue = images_BCHW.split(1, dim=1)
    return (red * 0.299).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def random_lighting(count: int, strength: float, generator: torch.Generator) -> Tensor:
    """AlexNet's lighting: a random shift_BC11 for each image, along ImageNet's main colours.

    Args:
        count: images in the batch that it is to be added to, in 0..255.
        strength: standard deviation of the shift, in multiples of ImageNet's own.
        generator: on the device of the batch.
    """
    device = generator.device
    amounts = torch.randn((count, 3), generator=generator, device=device) * strength
    return (amounts @ _directions(device))[:, :, None, None]


@cache
def _directions(device: torch.device) -> Tensor:
    # Copied to a device once only: a copy in every batch would make it wait.
    vectors = torch.tensor(LIGHTING_VECTORS) * torch.tensor(LIGHTING_VALUES) * 255
    return vectors.T.contiguous().to(device)
