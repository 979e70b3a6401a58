"""Runs the Triton kernels in Triton's interpreter, on a CPU; a process of its own, by a test."""

import itertools

import torch

from deepmoe.sparse.triton_kernels import collect

torch.manual_seed(0)
for outputs, inputs, kernel, dtype in itertools.product(
    (1, 5, 33), (1, 7, 300), (1, 3), (torch.float32, torch.bfloat16)
):
    weight = torch.randn(outputs, inputs, kernel, kernel).to(dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    for share in (0.3, 1.0):
        outs = torch.randperm(outputs)[: max(1, int(share * outputs))].sort().values
        ins = torch.randperm(inputs)[: max(1, int(share * inputs))].sort().values
        torch.testing.assert_close(collect(weight, outs, ins), weight[outs][:, ins], rtol=0, atol=0)
print("equal")
