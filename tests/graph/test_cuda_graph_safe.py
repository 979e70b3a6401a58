"""Nothing in a network's code comes from the CPU in each pass: a CUDA graph could not hold it.

There is no GPU here. What a pass makes out of numbers of Python is watched instead.
"""

import pytest
import torch
import torch.nn.functional as F
from flattening_networks import IMAGES, Flattened
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepmoe import gate
from deepmoe.errors import UserError
from deepmoe.graph.running import Progression, progressions
from deepmoe.sparse import sparsify


class Backwards(Flattened):
    """Reads its channels from the last to the first."""

    def flat(self, x: Tensor) -> Tensor:
        return torch.flatten(x.flip(1), 1)


class Normalising(Flattened):
    """Holds numbers in its code."""

    def prepared(self, x: Tensor) -> Tensor:
        mean = torch.tensor([0.4, 0.5, 0.6], device=x.device).view(1, 3, 1, 1)
        return (x - mean) / torch.tensor(0.25)


class Exact(Flattened):
    """Holds numbers of the precision that its images have."""

    def prepared(self, x: Tensor) -> Tensor:
        scale = torch.tensor([[1, 2, 3]], dtype=x.dtype, device=x.device)
        return x * scale[:, :, None, None] + x.new_tensor(1 / 3)


class Watch(TorchDispatchMode):
    """Counts what is made of numbers that lie in the memory of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.brought = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.brought += "lift_fresh" in str(function)
        return function(*args, **(kwargs or {}))


def test_the_watch_sees_numbers_that_are_brought() -> None:
    with Watch() as watch:
        torch.tensor([1.0, 2.0])
        torch.zeros(2).new_full((), 1.0)
    assert watch.brought == 1


@pytest.mark.parametrize("kind", [Flattened, Backwards, Normalising, Exact])
def test_a_pass_brings_no_numbers(kind: type[Flattened]) -> None:
    torch.manual_seed(0)
    network = kind().eval()
    model = gate(network, IMAGES, where=["first", "second", "hidden"]).eval()
    widths = model.gating.widths
    gates = [torch.rand(len(IMAGES), width) for width in widths]
    with torch.no_grad(), Watch() as watch:
        torch.testing.assert_close(model.gating(model.network, IMAGES, None), network(IMAGES))
        watch.brought = 0
        found = model.gating(model.network, IMAGES, gates)
    assert watch.brought == 0

    def by_hand(x: Tensor) -> Tensor:
        x = F.relu(network.first(network.prepared(x))) * gates[0][:, :, None, None]
        x = F.relu(network.second(x)) * gates[1][:, :, None, None]
        x = F.relu(network.hidden(network.flat(F.max_pool2d(x, 2)))) * gates[2]
        return network.classifier(x)

    torch.testing.assert_close(found, by_hand(IMAGES))


def test_numbers_keep_their_precision() -> None:
    network, images = Exact().double().eval(), IMAGES.double()
    model = gate(network, images).eval()
    assert torch.equal(model.gating(model.network, images, None), network(images))


def test_numbers_of_the_images_stay_what_they_are() -> None:
    class Sized(Flattened):
        def prepared(self, x: Tensor) -> Tensor:
            return x / torch.tensor([x.shape[2]], device=x.device)

    network = Sized().eval()
    model = gate(network, IMAGES).eval()
    torch.testing.assert_close(model.gating(model.network, IMAGES, None), network(IMAGES))


@pytest.mark.parametrize("kind", [Flattened, Backwards, Normalising, Exact])
def test_the_engine_runs_it(kind: type[Flattened]) -> None:
    torch.manual_seed(0)
    model = gate(kind(), IMAGES, where=["first", "second", "hidden"]).eval()
    with torch.no_grad():
        for head in model.heads.parameters():
            head.add_(0.3 * torch.randn_like(head))
        expected = model(IMAGES).logits
        torch.testing.assert_close(sparsify(model)(IMAGES).logits, expected)


@pytest.mark.parametrize(
    ("numbers", "rules"),
    [
        ([0, 1, 2], [(0, ((3, 1),))]),
        ([2, 1, 0], [(2, ((3, -1),))]),
        ([0, 0, 1, 1], [(0, ((2, 1), (2, 0)))]),
        ([0, 4, 1, 5, 2, 6], [(0, ((3, 1), (2, 4)))]),
        ([5, 0, 1], [(5, ((2, -5),)), (1, ())]),
        ([], []),
    ],
)
def test_numbers_of_gates_by_rules(numbers: list[int], rules: list[tuple[int, tuple]]) -> None:
    assert progressions(numbers) == tuple(Progression(*rule) for rule in rules)


@pytest.mark.parametrize("seed", range(50))
def test_rules_give_any_numbers(seed: int) -> None:
    numbers = torch.randint(4, (1 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [part.on(torch.device("cpu")) for part in progressions(numbers)]
    assert torch.cat(parts).tolist() == numbers


class Asking(Flattened):
    """Asks for a shape in its own words, so that torch.export has to follow it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            raise ValueError
        return super().forward(x)


class NormalisingAsking(Asking):
    prepared = Normalising.prepared


def test_constants_of_an_exported_network() -> None:
    torch.manual_seed(0)
    network = NormalisingAsking().eval()
    model = gate(network, IMAGES, where=["first", "second", "hidden"]).eval()
    with torch.no_grad(), Watch() as watch:
        found = model.gating(model.network, IMAGES, None)
        assert watch.brought == 0
        torch.testing.assert_close(found, network(IMAGES))


class NamedView(Flattened):
    """Has a layer that is called as an operation is."""

    def __init__(self) -> None:
        super().__init__()
        self.view = nn.Conv2d(3, 3, 1)

    def prepared(self, x: Tensor) -> Tensor:
        return self.view(x)


class Large(Flattened):
    """Holds numbers beyond single precision: what they come to is for PyTorch to say."""

    def prepared(self, x: Tensor) -> Tensor:
        most = torch.tensor([1e39, 2.0**62 + 1], device=x.device)
        whole = torch.tensor(2**62 + 1, device=x.device)
        near = torch.tensor([0.1 + 0.2j], dtype=torch.complex128, device=x.device).real
        return torch.clamp(x, max=x.new_tensor(1e39)) / most[1] * whole * near.to(x.dtype)


@pytest.mark.parametrize("kind", [NamedView, Large])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odd_constants_and_names(kind: type[Flattened], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network, images = kind().to(dtype).eval(), IMAGES.to(dtype)
    model = gate(network, images).eval()
    assert torch.equal(model.gating(model.network, images, None), network(images))


class Counting(Flattened):
    """Reshapes by a number of channels that half of them would fit, too."""

    def flat(self, x: Tensor) -> Tensor:
        return torch.flatten(x.view(x.shape[0], 4, -1).flip(2).view(x.shape), 1)


@pytest.mark.filterwarnings("ignore:.*stays ungated")
def test_channels_that_a_view_counts_stay() -> None:
    groups = gate(Counting(), IMAGES, where=["first", "hidden"]).gating.graph.groups
    pinned = {group.name: group.pinned for group in groups}
    assert "relies on" in pinned["second"]
    assert pinned["first"] is None


class Valued(Flattened):
    """Branches on a value that it has made itself."""

    def prepared(self, x: Tensor) -> Tensor:
        return x[:, torch.tensor([True, True, True])] * torch.tensor(x.shape[2])


def test_code_that_needs_values_gets_one_sentence() -> None:
    with pytest.raises(UserError, match="without the values of its images"):
        gate(Valued(), IMAGES)
