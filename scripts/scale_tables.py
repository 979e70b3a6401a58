"""The tables of docs/scale.md: ImageNet, planned from what was measured on smaller runs.

A training step is taken apart as its kernels were measured: convolutions and products, whose time
goes with MACs, and elementwise work, whose time goes with the elements that convolutions put out.
"""

import functools
from typing import Any, NamedTuple

import torch
from result_files import benchmark, origin
from torch import Tensor, nn

from deepmoe import create_model
from deepmoe.costs import count_macs
from deepmoe.results import markdown_table

CALIBRATED = {"vgg16": "train_speed_vgg16", "resnet56": "train_speed_resnet56"}
PLANNED = {"resnet18, wide 2": "resnet18", "resnet50-A, wide 2": "resnet50"}
IMAGES, BATCH, SIZE = 1_281_167, 256, 224  # of ImageNet; of each GPU; pixels a side
GPUS = ((1, 1), (1, 8), (2, 8), (8, 8))  # machines, and GPUs of each
EPOCHS = {"100 epochs": 100, "18 epochs": 18}  # the paper's schedule, and the short one
# Assumed, not measured: bytes a second from GPU to GPU in a machine, and between machines.
WITHIN, BETWEEN = 450e9, 50e9
BYTES_A_WEIGHT = 12  # weight, gradient and momentum in single precision
HALF = 0.5  # activations are kept in half precision: of what single precision takes
HOUR = 3_600


class Shape(NamedTuple):
    """What a network's time and memory follow from, for one image."""

    macs: float
    outputs: int  # elements that convolutions put out
    saved: int  # bytes that a backward pass needs, in single precision
    weights: int


@functools.cache
def shape_of(name: str, size: int, wide: float) -> Shape:
    """Counts, by running the network once."""
    options = {"block": "bottleneck-a"} if name == "resnet50" else {}
    model = create_model(name, gates=None, wide=wide, **options)
    network, outputs, saved = model.network.train(), [0], {}

    def count(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs[0] += output.numel()

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, nn.Conv2d)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = network(torch.zeros(1, 3, size, size))
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() for p in network.parameters())
    of_weights = 4 * sum(p.numel() for p in network.parameters() if p.data_ptr() in saved)
    del logits
    kept = sum(saved.values()) - of_weights
    return Shape(count_macs(model.gating, size), outputs[0], kept, weights)


class Rates(NamedTuple):
    """What one GPU does in a second, and what gates add to a step."""

    macs: float
    elements: float
    joint: float


@functools.cache
def rates() -> dict[str, Rates]:
    """Of each network that was measured; a step runs the MACs three times, forward and back."""
    found = {}
    for name, file in CALIBRATED.items():
        values = benchmark(file)["values"]
        spent, batch = values["gpu_milliseconds_per_batch"]["dense"], values["batch_size"]
        shape = shape_of(name, 32, 1.0)
        macs = 3e3 * batch * shape.macs / spent["convolutions and products"]
        elements = 1e3 * batch * shape.outputs / spent["elementwise and sums"]
        found[name] = Rates(macs, elements, values["ratio_to_dense"]["joint"])
    return found


def step_seconds(shape: Shape, machines: int, gpus: int) -> tuple[float, float]:
    """A joint step of one GPU, by the faster and by the slower guess; gradients are then summed.

    Half of vgg16's rate of convolutions is the slower guess: ResNet-50 has kernels of 1x1, and
    resnet56, with its 16 to 64 channels, far less.
    """
    known = rates()
    elementwise = BATCH * shape.outputs / min(rate.elements for rate in known.values())
    multiplied = 3 * BATCH * shape.macs / known["vgg16"].macs
    joint = max(rate.joint for rate in known.values())
    workers, speed = machines * gpus, WITHIN if machines == 1 else BETWEEN
    summed = 2 * (workers - 1) / workers * 4 * shape.weights / speed
    fast, slow = (joint * (elementwise + factor * multiplied) + summed for factor in (1, 2))
    return fast, slow


def measured_table() -> str:
    """What the plan is made from."""
    rows = []
    for name, file in CALIBRATED.items():
        values, rate = benchmark(file)["values"], rates()[name]
        step = values["milliseconds_per_batch"]
        rows.append(
            (
                name,
                values["batch_size"],
                f"{step['dense']['step']:.2f}",
                f"{step['joint']['step']:.2f}",
                f"{rate.macs / 1e12:.0f}",
                f"{rate.elements / 1e9:.0f}",
            )
        )
    header = ["network", "batch", "dense step, ms", "joint step, ms"]
    header += ["MACs a second, 10^12", "elements a second, 10^9"]
    results = [benchmark(file) for file in CALIBRATED.values()]
    decode = benchmark("input_speed")
    per_core = decode["values"]["ours_decode_per_s"]
    sentence = f"One CPU core decodes and crops {per_core:.0f} images a second {origin(decode)}."
    return "\n\n".join([markdown_table(header, rows), origin(*results), sentence])


def plan_table() -> str:
    """Steps, decode cores and hours on several numbers of GPUs."""
    per_core, rows = benchmark("input_speed")["values"]["ours_decode_per_s"], []
    for title, name in PLANNED.items():
        shape = shape_of(name, SIZE, 2.0)
        for machines, gpus in GPUS:
            steps = step_seconds(shape, machines, gpus)
            speeds = [BATCH / seconds for seconds in steps]
            hours = [
                [epochs * IMAGES / (speed * machines * gpus) / HOUR for speed in speeds]
                for epochs in EPOCHS.values()
            ]
            rows.append(
                (
                    title,
                    f"{machines} x {gpus}",
                    _span([1e3 * s for s in steps], ".0f"),
                    _span(speeds, ",.0f"),
                    _span([speed / per_core for speed in speeds], ".1f"),
                    *(_span(spent, ".1f") for spent in hours),
                )
            )
    header = ["network", "GPUs", "ms a step", "images a second, each GPU", "decode cores, each GPU"]
    return markdown_table([*header, *(f"hours, {name}" for name in EPOCHS)], rows)


def memory_table() -> str:
    """What one GPU has to hold."""
    rows = []
    for title, name in PLANNED.items():
        shape = shape_of(name, SIZE, 2.0)
        weights, kept = BYTES_A_WEIGHT * shape.weights, HALF * BATCH * shape.saved
        total = weights + kept
        rows.append((title, *(f"{value / 2**30:.1f}" for value in (weights, kept, total))))
    header = ["network", "weights and optimiser, GiB", "activations of 256 images, GiB", "sum, GiB"]
    return markdown_table(header, rows)


def _span(values: list[float], form: str) -> str:
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
