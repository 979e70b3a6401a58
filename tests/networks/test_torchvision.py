"""Parity with torchvision, where it imports."""

import pytest
import torch
from helpers import randomise_statistics
from third_party import torchvision_models

from deepmoe.registry import create_model


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("resnet18", "resnet18", {}),
        ("resnet50", "resnet50", {}),
        ("resnet50", "wide_resnet50_2", {"wide": 2, "block": "bottleneck-a"}),
    ],
)
@torch.no_grad()
def test_same_weights_give_the_same_outputs(name, theirs, options) -> None:
    reference = randomise_statistics(getattr(torchvision_models(), theirs)()).eval()
    ours = create_model(name, **options).network.eval()
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x), reference(x), atol=1e-4, rtol=0)


def test_a_resnet50_is_named_as_in_torchvision() -> None:
    # The names follow a rule, so they can be checked where torchvision is absent.
    names = {"conv1.weight", "fc.weight", "fc.bias"}
    suffixes = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    names |= {f"bn1.{s}" for s in suffixes}
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            names |= {f"{at}.conv{i}.weight" for i in (1, 2, 3)}
            names |= {f"{at}.bn{i}.{s}" for i in (1, 2, 3) for s in suffixes}
            if block == 0:
                names |= {f"{at}.downsample.0.weight"}
                names |= {f"{at}.downsample.1.{s}" for s in suffixes}
    with torch.device("meta"):
        assert create_model("resnet50").network.state_dict().keys() == names


def test_convolutions_of_a_vgg16_are_numbered_as_in_torchvision() -> None:
    numbers = (0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)  # of its vgg16_bn
    with torch.device("meta"):
        network = create_model("vgg16").network
    convs = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Conv2d)]
    norms = [n for n, m in network.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert convs == [f"features.{number}" for number in numbers]
    assert norms == [f"features.{number + 1}" for number in numbers]
