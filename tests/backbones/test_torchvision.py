"""Parity with torchvision, where it imports."""

import pytest
import torch
from helpers import randomise_statistics

from deepmoe.backbones.resnet import torchvision_state
from deepmoe.registry import create_model


@pytest.fixture(scope="module")
def torchvision_models():
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # without CUDA it may be there and yet not import
        pytest.skip(f"torchvision does not import: {error}")
    return models


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("resnet18", "resnet18", {}),
        ("resnet50", "resnet50", {}),
        ("resnet50", "wide_resnet50_2", {"wide": 2, "block": "bottleneck-a"}),
    ],
)
@torch.no_grad()
def test_same_weights_give_the_same_outputs(name, theirs, options, torchvision_models) -> None:
    reference = randomise_statistics(getattr(torchvision_models, theirs)()).eval()
    ours = create_model(name, **options).backbone.eval()
    ours.load_state_dict(torchvision_state(reference.state_dict()))
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(ours(x, None), reference(x), atol=1e-4, rtol=0)


def test_every_name_of_a_torchvision_resnet50_is_translated() -> None:
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
    translated = torchvision_state(dict.fromkeys(names))
    with torch.device("meta"):
        assert translated.keys() == create_model("resnet50").backbone.state_dict().keys()
