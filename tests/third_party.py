"""Networks of other packages with random weights; who lacks a package skips its tests."""

from collections.abc import Callable
from types import ModuleType

import pytest
from torch import nn

from deepmoe.sources import import_torchvision

CLASSES = 10


def torchvision_models() -> ModuleType:
    """`torchvision.models`, also where torchvision's binary part does not load."""
    import_torchvision()
    return pytest.importorskip("torchvision.models")


def timm() -> ModuleType:
    """`timm`, which imports torchvision."""
    torchvision_models()
    return pytest.importorskip("timm")


def transformers() -> ModuleType:
    """`transformers`, which imports torchvision for some of its models."""
    torchvision_models()
    return pytest.importorskip("transformers")


def _hugging_face(kind: str, **options: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        package = transformers()
        config = getattr(package, f"{kind}Config")(num_labels=CLASSES, **options)
        return getattr(package, f"{kind}ForImageClassification")(config)

    return make


def _timm(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: timm().create_model(name, num_classes=CLASSES, **options)


def _torchvision(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: torchvision_models().get_model(
        name, weights=None, num_classes=CLASSES, **options
    )


def _vgg16_bn() -> nn.Module:
    network = torchvision_models().vgg16_bn(num_classes=CLASSES)
    # Its own linear layers have 120 million weights, and would take most of the time.
    network.classifier[0] = nn.Linear(512 * 7 * 7, 128)
    network.classifier[3] = nn.Linear(128, 64)
    network.classifier[6] = nn.Linear(64, CLASSES)
    return network


def _torchvision_resnet() -> nn.Module:
    resnet = torchvision_models().resnet
    return resnet.ResNet(resnet.Bottleneck, list(FEW_BLOCKS), num_classes=CLASSES)


def _torchvision_densenet() -> nn.Module:
    return torchvision_models().DenseNet(16, FEW_BLOCKS, 32, num_classes=CLASSES)


# Of every kind of block and stage; more of the same would only take longer.
FEW_BLOCKS = (1, 2, 1, 1)
# ConvNeXt starts with blocks that add a millionth of what they compute: no mistake would show.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "hf-resnet": _hugging_face("ResNet", depths=list(FEW_BLOCKS)),
    "hf-regnet-y": _hugging_face("RegNet", layer_type="y", depths=list(FEW_BLOCKS)),
    "hf-mobilenet-v2": _hugging_face("MobileNetV2"),
    "hf-efficientnet": _hugging_face(
        "EfficientNet",
        width_coefficient=1.0,
        depth_coefficient=1.0,
        num_block_repeats=[1, 2, 1, 1, 1, 1, 1],
        dropout_rate=0.2,
        image_size=224,
        hidden_dim=1280,
    ),
    "hf-convnext": _hugging_face("ConvNext", layer_scale_init_value=0.5, depths=list(FEW_BLOCKS)),
    "timm-resnet50": _timm("resnet50", layers=FEW_BLOCKS),
    "timm-seresnet50": _timm("seresnet50", layers=FEW_BLOCKS),
    "timm-regnety_002": _timm("regnety_002"),
    "timm-mobilenetv3_small_100": _timm("mobilenetv3_small_100"),
    "timm-convnext_tiny": _timm("convnext_tiny", ls_init_value=0.5, depths=FEW_BLOCKS),
    "timm-efficientnet_b0": _timm("efficientnet_b0"),
    "timm-dla34": _timm("dla34"),
    "torchvision-resnet": _torchvision_resnet,
    "torchvision-vgg16_bn": _vgg16_bn,
    "torchvision-densenet": _torchvision_densenet,
    "torchvision-googlenet": _torchvision("googlenet", aux_logits=False, init_weights=False),
    "torchvision-mobilenet_v2": _torchvision("mobilenet_v2"),
}
