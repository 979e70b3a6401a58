"""The shallow embedding network: one look at the image, mixture weights for every layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe.errors import UserError
from deepmoe.ops import at_least_single

CIFAR_WIDTHS = (64, 64, 128, 256)
IMAGENET_WIDTHS = (16, 32, 64, 128, 256)  # 1.6 % of ResNet-50's MACs


class ConvNormReLU(nn.Module):
    """A 3x3 convolution of stride 2, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x_BCHW)))


class ShallowEmbedding(nn.Module):
    """3x3 convolutions of stride 2, global pooling, a linear layer, softmax.

    Args:
        classes: number of classes of the embedding's own cross-entropy.
        form: `classes` uses the softmax of the class logits as mixture weights; `latent` has `dim`
            free mixture weights and a linear classifier on top of them.
        dim: number of mixture weights of the `latent` form.
        widths: output channels of each convolution; four for 32 px, five for 224 px.
        task_gradient: whether it also learns through what is made of the mixture weights. If not,
            the base network can't use it to know its training images by heart.
        colours: channels of the images.
        shrink: it looks at the mean of so many pixels by so many.
    """

    def __init__(
        self,
        classes: int,
        *,
        form: str = "classes",
        dim: int = 32,
        widths: tuple[int, ...] = CIFAR_WIDTHS,
        task_gradient: bool = True,
        colours: int = 3,
        shrink: int = 1,
    ) -> None:
        super().__init__()
        if form not in ("classes", "latent"):
            raise UserError(f"the embedding's form is classes or latent, not {form!r}")
        if not widths or min(widths) < 1:
            raise UserError(f"the embedding needs widths of at least 1, not {list(widths)}")
        self.form = form
        self.widths = widths
        self.shrink = shrink
        self.task_gradient = task_gradient
        self.dim = classes if form == "classes" else dim
        inputs = (colours, *widths[:-1])
        self.convs = nn.Sequential(
            *(ConvNormReLU(i, o) for i, o in zip(inputs, widths, strict=True))
        )
        self.project = nn.Linear(widths[-1], self.dim)
        self.classifier: nn.Module = nn.Identity()
        if form == "latent":
            self.classifier = nn.Linear(dim, classes)
            # Mixture weights start at one over their number. A classifier whose weights started
            # as if they were about one would pass on next to no gradient.
            nn.init.uniform_(self.classifier.weight, -(dim**0.5), dim**0.5)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixture weights e_BD (on the simplex) and the class logits of L_e."""
        return self.mix(self.convs(self.shrunk(x_BCHW)))

    def shrunk(self, x_BCHW: Tensor) -> Tensor:
        """What the convolutions look at."""
        if self.shrink == 1:
            return x_BCHW
        return F.avg_pool2d(x_BCHW, self.shrink, ceil_mode=True)

    def mix(self, features_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """The same, from what the convolutions give."""
        z_BD = self.project(features_BCHW.mean(dim=(2, 3)))
        # At least in single precision: what the gates are made of must not be coarse.
        e_BD = F.softmax(at_least_single(z_BD), dim=-1)
        logits = z_BD
        if self.form == "latent":
            logits = self.classifier(e_BD.to(self.project.weight.dtype))
        return e_BD if self.task_gradient else e_BD.detach(), logits

    def macs(self, height: int, width: int) -> int:
        """MACs of one image of this size."""
        total = self.project.weight.numel()
        if isinstance(self.classifier, nn.Linear):
            total += self.classifier.weight.numel()
        height, width = -(-height // self.shrink), -(-width // self.shrink)
        for block in self.convs:
            assert isinstance(block, ConvNormReLU)
            height, width = -(-height // 2), -(-width // 2)
            total += block.conv.weight.numel() * height * width
        return total
