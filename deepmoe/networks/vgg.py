"""VGG with batch norm and one linear layer, as used on CIFAR."""

from collections.abc import Sequence

from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.networks.widths import initialise_convs, scaled_width

CONVS_PER_STAGE = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
STAGE_WIDTHS = (64, 128, 256, 512, 512)

# The widening strategies of the paper: about equal parameters, placed differently in the network.
VGG16_WIDTHS = {
    "w1-high": (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 1536, 512, 512),
    "w1-mid": (64, 64, 128, 128, 2990, 256, 256, 512, 512, 512, 512, 512, 512),
    "w4-low": (512, 512, 615, 615, 256, 256, 256, 512, 512, 512, 512, 512, 512),
    "w13-all": (128, 128, 256, 256, 405, 405, 405, 615, 615, 615, 615, 615, 615),
}


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each followed by 2x2 max pooling.

    Args:
        convs_per_stage: number of convolutions before each pooling.
        widths: output channels of every convolution.
        classes: number of classes.
    """

    def __init__(self, convs_per_stage: Sequence[int], widths: Sequence[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, left = 3, iter(widths)
        for convs in convs_per_stage:
            for _ in range(convs):
                width = next(left)
                layers += [
                    nn.Conv2d(inputs, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, classes)
        initialise_convs(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(self.features(x_BCHW).mean(dim=(2, 3)))


def make_vgg(
    depth: int, classes: int, *, wide: float = 1.0, widths: str | Sequence[int] | None = None
) -> VGG:
    """Builds VGG-`depth`.

    Args:
        depth: 11, 13, 16 or 19.
        classes: number of classes.
        wide: factor on the width of every convolution.
        widths: output channels of every convolution, or (VGG-16) a widening strategy's name.
    """
    stages = CONVS_PER_STAGE[depth]
    if isinstance(widths, str):
        if depth != 16 or widths not in VGG16_WIDTHS:
            raise UserError(
                f"vgg{depth} has no widths named {widths!r}; "
                f"vgg16 has {', '.join(VGG16_WIDTHS)}, and any VGG takes a list"
            )
        widths = VGG16_WIDTHS[widths]
    elif widths is None:
        widths = [w for w, count in zip(STAGE_WIDTHS, stages, strict=True) for _ in range(count)]
    if len(widths) != sum(stages):
        raise UserError(f"this VGG has {sum(stages)} convolutions, but got {len(widths)} widths")
    return VGG(stages, [scaled_width(w, wide) for w in widths], classes)


def inner_convs(network: nn.Module, *, gate_last: bool = False) -> list[str]:
    """Paths of the convolutions that the paper gates.

    Args:
        network: a VGG.
        gate_last: also the last one. That gate is a shortcut from the embedding to the logits, and
            the network learns to copy the embedding's guess.
    """
    assert isinstance(network, VGG)
    convs = [f"features.{i}" for i, m in enumerate(network.features) if isinstance(m, nn.Conv2d)]
    return convs if gate_last else convs[:-1]
