import torch
import torch.nn.functional as F

from deepmoe.ops import mixture_of_experts_conv2d, scale_channels


def test_scaling_input_channels_is_the_mixture_of_experts() -> None:
    x, weight = torch.randn(3, 6, 9, 7), torch.randn(5, 6, 3, 3)
    gates = torch.rand(3, 6) * (torch.rand(3, 6) < 0.6)
    for stride, padding in [(1, 1), (2, 1), (1, 0)]:
        by_scaling = F.conv2d(scale_channels(x, gates), weight, stride=stride, padding=padding)
        by_sum = mixture_of_experts_conv2d(x, weight, gates, stride=stride, padding=padding)
        torch.testing.assert_close(by_scaling, by_sum, atol=1e-5, rtol=1e-5)


def test_gates_keep_the_dtype_of_activations() -> None:
    x = torch.randn(2, 4, 3, 3, dtype=torch.bfloat16)
    assert scale_channels(x, torch.rand(2, 4)).dtype == torch.bfloat16
    assert scale_channels(x, None) is x
