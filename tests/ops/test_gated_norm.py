"""Batch norm, ReLU and gate in one against the same one after the other."""

import copy

import pytest
import torch
from torch import Tensor, nn

from deepmoe.layers import GatedConv


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_compiled_gated_convolution_equals_the_plain_one(
    dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    plain = GatedConv(5, 7, 3)
    plain.bn.weight.data.normal_()
    plain.bn.bias.data.normal_()
    plain = plain.to(torch.float64 if dtype == torch.float64 else torch.float32)
    fused = copy.deepcopy(plain)
    wide = next(plain.parameters()).dtype
    x, g = torch.randn(4, 5, 6, 6, dtype=wide), torch.rand(4, 7, dtype=wide).sub(0.3).relu()
    assert (g == 0).any()  # a closed gate has a gradient too
    torch.compiler.reset()
    expected = _outputs_and_gradients(plain, x, g, dtype)
    actual = _outputs_and_gradients(
        torch.compile(fused, backend="aot_eager", fullgraph=True), x, g, dtype
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        ours, theirs = getattr(fused.bn, name), getattr(plain.bn, name)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def _outputs_and_gradients(
    layer: nn.Module, x: Tensor, g: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    x, g = x.clone().requires_grad_(), g.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = layer(x, g)
    pull = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out, *torch.autograd.grad(out, [x, g, *layer.parameters()], pull)]
