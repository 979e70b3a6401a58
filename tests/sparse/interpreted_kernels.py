"""Runs the Triton kernels in Triton's interpreter, on a CPU; a process of its own, by a test."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from deepmoe.sparse.few_inputs import ImageConvolution
from deepmoe.sparse.folding import FoldedLayer
from deepmoe.sparse.triton_kernels import collect, finish_, max_pool, routes

PRECISIONS = (torch.float32, torch.bfloat16)


def channels_last(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).contiguous(memory_format=torch.channels_last)


def check_collect() -> None:
    for outputs, inputs, kernel, dtype in itertools.product((1, 7), (5, 300), (1, 3), PRECISIONS):
        weight = channels_last(outputs, inputs, kernel, kernel, dtype=dtype)
        for share in (0.3, 1.0):
            outs = torch.randperm(outputs)[: max(1, int(share * outputs))].sort().values
            ins = torch.randperm(inputs)[: max(1, int(share * inputs))].sort().values
            expected = weight[outs][:, ins]
            torch.testing.assert_close(collect(weight, outs, ins), expected, rtol=0, atol=0)


def check_finish() -> None:
    for channels, size, dtype in itertools.product((3, 140), ((1, 1), (7, 9)), PRECISIONS):
        x = channels_last(3, channels, *size, dtype=dtype)
        scale, bias = torch.randn(channels), torch.randn(channels)
        gate = torch.rand(3, channels + 5)[:, 5:]  # a layer's part of all gates
        y = x.float() * scale[:, None, None] + bias[:, None, None]
        expected = (y.relu() * gate[:, :, None, None]).to(dtype)
        torch.testing.assert_close(
            finish_(x.clone(), scale=scale, bias=bias, gate=gate, relu=True), expected
        )
        plain = (x.float() + bias[:, None, None]).to(dtype)
        torch.testing.assert_close(finish_(x.clone(), bias=bias), plain)


def check_max_pool() -> None:
    for channels, size, window, dtype in itertools.product(
        (5, 130), ((2, 2), (5, 14)), ((2, 2, 0), (3, 2, 1)), PRECISIONS
    ):
        x = channels_last(2, channels, *size, dtype=dtype)
        pooled = F.max_pool2d(x, *window)
        torch.testing.assert_close(max_pool(x, *window), pooled, rtol=0, atol=0)
        gate = torch.rand(2, channels + 3)[:, 3:]
        gated = (pooled.float() * gate[:, :, None, None]).to(dtype)
        torch.testing.assert_close(max_pool(x, *window, gate), gated)


def check_routes() -> None:
    for images, channels in itertools.product((1, 3), (1, 700, 2100)):
        gates = (torch.rand(images, channels) - 0.5).relu()
        keys = torch.randint(2**62, (channels,))  # their sum overflows, on purpose
        numbers, active = routes(gates, keys)
        torch.testing.assert_close(numbers, ((gates > 0) * keys).sum(dim=1))
        torch.testing.assert_close(active, (gates > 0).sum(dim=1))


def check_image_convolution() -> None:
    for kernel, stride, padding, inputs, size in (
        (7, 2, 3, 3, (13, 18)),
        (3, 2, 1, 3, (12, 11)),
        (3, 1, 1, 3, (9, 8)),
        (7, 1, 3, 1, (16, 9)),
        (5, 3, 1, 4, (14, 13)),
        (11, 4, 2, 3, (19, 24)),
    ):
        layer = FoldedLayer(
            torch.randn(5, inputs, kernel, kernel).double(),
            None,
            stride=(stride, stride),
            padding=(padding, padding),
        )
        x = torch.randn(2, inputs, *size)
        rewritten = ImageConvolution(layer)
        for images in (x, x.contiguous(memory_format=torch.channels_last)):
            ours = F.conv2d(rewritten.patches_of(images), rewritten.layer.weight)
            torch.testing.assert_close(
                ours, F.conv2d(x.double(), layer.weight, None, stride, padding)
            )


torch.manual_seed(0)
check_collect()
check_finish()
check_max_pool()
check_routes()
check_image_convolution()
print("equal")
