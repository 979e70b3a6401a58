import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics

from deepmoe.layers import GatedConv
from deepmoe.ops import mixture_of_experts_conv2d


@pytest.mark.parametrize("training", [True, False])
def test_order_is_conv_bn_gate_relu(training: bool) -> None:
    layer = randomise_statistics(GatedConv(3, 8, 3)).train(training)
    x, gate = torch.randn(4, 3, 6, 6), torch.rand(4, 8)
    reference = F.batch_norm(
        F.conv2d(x, layer.conv.weight, padding=1),
        layer.bn.running_mean.clone(),
        layer.bn.running_var.clone(),
        layer.bn.weight,
        layer.bn.bias,
        training=training,
    )
    expected = F.relu(reference * gate[:, :, None, None])
    torch.testing.assert_close(layer(x, gate), expected)


def test_closed_gate_gives_zeros_whatever_bn_does() -> None:
    layer = randomise_statistics(GatedConv(3, 4, 3)).eval()
    gate = torch.tensor([[0.0, 1.0, 0.0, 2.0]])
    y = layer(torch.randn(1, 3, 5, 5), gate)
    assert (y[:, [0, 2]] == 0).all()
    assert (y[:, [1, 3]] != 0).any()


def test_two_gated_convolutions_are_the_explicit_mixture_of_experts() -> None:
    first, second = (randomise_statistics(GatedConv(i, o, 3)).eval() for i, o in [(3, 6), (6, 5)])
    x, gate = torch.randn(2, 3, 8, 8), torch.rand(2, 6) * (torch.rand(2, 6) < 0.5)
    experts = first(x)  # ungated: relu(bn(conv(x)))
    mixture = mixture_of_experts_conv2d(experts, second.conv.weight, gate, padding=1)
    torch.testing.assert_close(
        second(first(x, gate)), F.relu(second.bn(mixture)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 2), (7, 2, 1), (1, 2, 1)]
)
@pytest.mark.parametrize(("height", "width"), [(9, 9), (10, 7)])
def test_output_size(kernel: int, stride: int, dilation: int, height: int, width: int) -> None:
    layer = GatedConv(3, 2, kernel, stride=stride, dilation=dilation)
    y = layer(torch.randn(1, 3, height, width))
    assert layer.output_size(height, width) == tuple(y.shape[-2:])


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_width_zero_is_an_empty_sum() -> None:
    x = torch.randn(2, 3, 8, 8)
    nothing = GatedConv(3, 0, 3, stride=2)(x)
    assert nothing.shape == (2, 0, 4, 4)
    after = randomise_statistics(GatedConv(0, 5, 3)).eval()
    expected = F.relu(after.bn(torch.zeros(2, 5, 4, 4)))
    torch.testing.assert_close(after(nothing), expected)
