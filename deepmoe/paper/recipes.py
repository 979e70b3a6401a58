"""The recipes that networks of the paper's tables are trained by.

*Literal* is the paper's: gates after every convolution, a latent embedding, lambda by hand, then
a stage with embedding and gates frozen. *Ours* starts from the trained dense network, opens a share
of its strongest channels, and learns from dense networks: docs/recipe.md.
"""

from typing import Any

# The reading of the paper that `literal` rows stand for: the one whose gates differ from image to
# image and close about half of vgg16 at full size (experiments/literal_cifar100). mu and the two
# stages are the presets'.
LITERAL: dict[str, Any] = {
    "model.gates": "inner",
    "embedding.form": "latent",
    "heads.init": "uniform(-0.5, 1)",
    "loss.l1": "sum",
    "loss.sparsity": 0.003,
}
LITERAL_LAST = {"model.gate_last": True}  # of networks that have a gate there

OURS: dict[str, Any] = {
    "heads.lr_scale": 30.0,
    "loss.sparsity": 0.0,
    "loss.distillation": 0.9,
}
OURS_OF_DATA: dict[str, dict[str, Any]] = {
    # Gates that learn 30 times as fast as the network were chosen on CIFAR.
    "cityscapes": {"embedding.form": "latent", "heads.lr_scale": 1.0},
}
# Ours at the full scale: as many epochs as the paper has, in one long cycle.
_CYCLE = {
    "train.schedule": "long-cycle",
    "train.nesterov": True,
    "train.weight_decay": 5e-4,
}
OURS_SCHEDULE: dict[str, dict[str, Any]] = {
    "cifar": {**_CYCLE, "train.lr": 0.1},
    "imagenet": {**_CYCLE, "train.lr": 0.1, "train.weight_decay": 5e-5},
    "segmentation": {**_CYCLE, "train.lr": 0.05},
}

# Networks that ours learns from on top of its own start: name, and whether of all seeds.
TEACHERS: dict[str, tuple[tuple[str, bool], ...]] = {
    "cifar10": (("vgg16", True), ("vgg16-w13-all", False)),
    "cifar100": (("vgg16", True), ("vgg16-w13-all", False)),
}
CODES, FEW_CODES = 16, 2  # routes of a codebook; at the smoke scale
