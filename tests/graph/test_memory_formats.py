"""Networks of any code run with channels last, as they are trained on a GPU."""

import pytest
import torch
from flattening_networks import IMAGES, Flattened
from torch import Tensor

from deepmoe import DeepMoE, gate
from deepmoe.graph.capture import _by_export, capture, evaluation_mode
from deepmoe.sparse import sparsify


class Viewed(Flattened):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class SizeByName(Viewed):
    def flat(self, x: Tensor) -> Tensor:
        return x.view(size=(x.shape[0], 4 * 4 * 4))


class LikeAnother(Viewed):
    def flat(self, x: Tensor) -> Tensor:
        return x.view_as(torch.flatten(x, 1))


class OtherBits(Viewed):
    """Reads its features as whole numbers, and back: a view that is no change of shape."""

    def flat(self, x: Tensor) -> Tensor:
        return super().flat(x.view(torch.int32).view(torch.float32))


def test_channels_that_are_read_as_other_numbers_stay() -> None:
    with pytest.warns(UserWarning, match="it reaches a view as numbers of another kind"):
        gate(OtherBits(), IMAGES, where="all")


def made(kind: type[Viewed]) -> DeepMoE:
    torch.manual_seed(0)
    return gate(kind(), IMAGES).eval()


@pytest.mark.filterwarnings("ignore:.*stays ungated")
@pytest.mark.parametrize("kind", [Viewed, SizeByName, LikeAnother, OtherBits])
def test_a_view_in_somebodys_code_allows_channels_last(kind: type[Viewed]) -> None:
    model = made(kind)
    expected = model(IMAGES).logits
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(IMAGES).logits, expected)


def test_it_learns_the_same() -> None:
    def gradients(memory_format: torch.memory_format) -> list[Tensor]:
        model = made(Viewed).to(memory_format=memory_format).train()
        model(IMAGES).logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, last = gradients(torch.contiguous_format), gradients(torch.channels_last)
    assert plain
    for one, other in zip(plain, last, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_also_where_it_is_captured_by_export() -> None:
    network = Viewed().to(memory_format=torch.channels_last)
    x = IMAGES.contiguous(memory_format=torch.channels_last)
    plain = Viewed()
    with evaluation_mode(plain):
        graph = _by_export(plain, IMAGES, plain(IMAGES))
    network.load_state_dict(plain.state_dict())
    with torch.no_grad():
        found = torch.fx.GraphModule(network, graph)(x)
        torch.testing.assert_close(found, plain(IMAGES))


def test_the_engine_runs_it() -> None:
    model = made(Viewed).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = model(IMAGES).logits
        torch.testing.assert_close(sparsify(model)(IMAGES).logits, expected)
    assert "view" not in {str(node.target) for node in capture(Viewed(), IMAGES).nodes}
