"""Networks of any code run with channels last, as they are trained on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepmoe import DeepMoE, gate
from deepmoe.graph.capture import _by_export, capture, evaluation_mode
from deepmoe.sparse import sparsify

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """Two convolutions, whose features are flattened by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3, padding=1)
        self.classifier = nn.Linear(4 * 8 * 8, 5)

    def flat(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.classifier(self.flat(x))


class SizeByName(Network):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(size=(x.shape[0], 4 * 8 * 8))


class LikeAnother(Network):
    def flat(self, x: Tensor) -> Tensor:
        return x.view_as(torch.flatten(x, 1))


class OtherBits(Network):
    """Reads its features as whole numbers, and back: a view that is no change of shape."""

    def flat(self, x: Tensor) -> Tensor:
        return super().flat(x.view(torch.int32).view(torch.float32))


def test_channels_that_are_read_as_other_numbers_stay() -> None:
    with pytest.warns(UserWarning, match="it reaches a view as numbers of another kind"):
        gate(OtherBits(), IMAGES, where="all")


def made(kind: type[Network]) -> DeepMoE:
    torch.manual_seed(0)
    return gate(kind(), IMAGES).eval()


@pytest.mark.filterwarnings("ignore:.*stays ungated")
@pytest.mark.parametrize("kind", [Network, SizeByName, LikeAnother, OtherBits])
def test_a_view_in_somebodys_code_allows_channels_last(kind: type[Network]) -> None:
    model = made(kind)
    expected = model(IMAGES).logits
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(IMAGES).logits, expected)


def test_it_learns_the_same() -> None:
    def gradients(memory_format: torch.memory_format) -> list[Tensor]:
        model = made(Network).to(memory_format=memory_format).train()
        model(IMAGES).logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, last = gradients(torch.contiguous_format), gradients(torch.channels_last)
    assert plain
    for one, other in zip(plain, last, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_also_where_it_is_captured_by_export() -> None:
    network = Network().to(memory_format=torch.channels_last)
    x = IMAGES.contiguous(memory_format=torch.channels_last)
    plain = Network()
    with evaluation_mode(plain):
        graph = _by_export(plain, IMAGES, plain(IMAGES))
    network.load_state_dict(plain.state_dict())
    with torch.no_grad():
        found = torch.fx.GraphModule(network, graph)(x)
        torch.testing.assert_close(found, plain(IMAGES))


def test_the_engine_runs_it() -> None:
    model = made(Network).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = model(IMAGES).logits
        torch.testing.assert_close(sparsify(model)(IMAGES).logits, expected)
    assert "view" not in {str(node.target) for node in capture(Network(), IMAGES).nodes}
