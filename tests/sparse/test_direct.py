"""The direct convolution against PyTorch's, over every geometry of the zoo and odd ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.sparse.direct import DirectConvolution, Forms, direct_runs
from deepmoe.sparse.folding import FoldedLayer

# kernel, stride, padding, dilation, size of the input
GEOMETRIES = [
    (1, 1, 0, 1, (7, 7)),
    (1, 1, 0, 1, (56, 55)),
    (1, 2, 0, 1, (29, 31)),
    (3, 1, 1, 1, (8, 8)),
    (3, 1, 1, 1, (4, 4)),
    (3, 1, 1, 1, (3, 5)),
    (3, 2, 2, 2, (7, 9)),
    (3, 1, 1, 1, (32, 33)),
    (3, 2, 1, 1, (29, 30)),
    (3, 1, 2, 2, (13, 17)),
    (3, 1, 4, 4, (9, 40)),
    (3, 2, 0, 2, (21, 16)),
    (2, 3, 1, 1, (40, 41)),
]


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def some_of(count: int, density: float) -> Tensor:
    chosen = torch.randperm(count)[: max(1, round(density * count))]
    return chosen.sort().values


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "size"), GEOMETRIES)
def test_active_channels_of_every_geometry(
    kernel: int, stride: int, padding: int, dilation: int, size: tuple[int, int], density: float
) -> None:
    torch.manual_seed(0)
    forms: Forms = {}
    geometry = ((stride,) * 2, (padding,) * 2, (dilation,) * 2)
    for inputs, outputs in ((7, 41), (20, 48), (1, 3)):  # the last uses the second's memory
        weight, bias = torch.randn(outputs, inputs, kernel, kernel), torch.randn(outputs)
        layer = FoldedLayer(weight, bias, *geometry, activation="relu" if inputs > 1 else "")
        outs, ins = some_of(outputs, density), some_of(inputs, density)
        x, gate = torch.randn(1, len(ins), *size), torch.rand(len(outs))
        assert direct_runs(layer, x)
        direct = DirectConvolution(layer, size, forms)
        expected = F.conv2d(x, weight[outs][:, ins], bias[outs], *geometry)
        expected = (expected.relu() if layer.relu else expected) * gate[:, None, None]
        found = direct(x, None, outs, ins, gate)
        assert error(found, expected) <= 1e-5
        again = direct(x, None, outs, ins, gate)
        torch.testing.assert_close(found, again, rtol=0, atol=0)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kernel", [1, 3])
def test_all_channels_onto_a_stream(kernel: int, channels_last: bool, relu: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 24, kernel, kernel), torch.randn(1, 24, 9, 11)
    onto, padding = torch.randn(1, 40, 9, 11), (kernel // 2,) * 2
    if channels_last:
        x, onto = (t.contiguous(memory_format=torch.channels_last) for t in (x, onto))
    layer, forms = FoldedLayer(weight, None, padding=padding, activation="relu" if relu else ""), {}
    expected = F.conv2d(x, weight, padding=padding) + onto
    expected = expected.relu() if relu else expected
    found = DirectConvolution(layer, (9, 11), forms)(x, onto, None, None, None)
    assert error(found, expected) <= 1e-5
    # What it leaves is taken as it is by the next.
    following = FoldedLayer(torch.randn(30, 40, 1, 1), torch.randn(30), activation="relu")
    expected = F.relu(F.conv2d(expected, following.weight, following.bias) + onto[:, :30])
    direct = DirectConvolution(following, (9, 11), forms)
    assert error(direct(found, onto[:, :30], None, None, None), expected) <= 1e-5


def test_what_it_does_not_run() -> None:
    x = torch.randn(1, 3, 8, 8)
    layer = FoldedLayer(torch.randn(32, 3, 3, 3), None, padding=(1, 1))
    assert direct_runs(layer, x)
    assert not direct_runs(layer, x[..., :1, :1])
    assert not direct_runs(layer, x.double())
    assert not direct_runs(layer, x.expand(2, -1, -1, -1))
    assert not direct_runs(FoldedLayer(torch.randn(32, 3, 5, 5), None), x)
    assert not direct_runs(FoldedLayer(torch.randn(3, 1, 3, 3), None, groups=3), x)
