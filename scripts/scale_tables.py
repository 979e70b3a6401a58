"""The tables of docs/scale.md: ImageNet, planned from training steps that were measured on one GPU.

Only the sums of gradients between GPUs are calculated; they are added to the measured step.
"""

from typing import Any

from result_files import benchmark, origin

from deepmoe.config import load_config
from deepmoe.configured_models import model_from_config
from deepmoe.results import markdown_table

MEASURED = {
    "resnet18, wide 2": "train_speed_resnet18_imagenet",
    "resnet50-A, wide 2": "train_speed_resnet50a",
}
IMAGES, CLASSES = 1_281_167, 1_000  # of ImageNet
GPUS = ((1, 1), (1, 8), (2, 8), (8, 8))  # machines, and GPUs of each
EPOCHS = {"100 epochs": 100, "18 epochs": 18}  # the paper's schedule, and the short one
# Assumed, not measured: bytes a second from GPU to GPU in a machine, and between machines.
WITHIN, BETWEEN = 450e9, 50e9
BYTES_A_GRADIENT = 4  # single precision
HOUR = 3_600


def measured_table() -> str:
    """What the plan is made from: steps and memory of one GPU, and the rate of decoding."""
    results, rows = [benchmark(file) for file in MEASURED.values()], []
    for title, result in zip(MEASURED, results, strict=True):
        values = result["values"]
        dense, joint = (step_milliseconds(values, kind) for kind in ("dense", "joint"))
        memory = (f"{values['gpu_gib'][kind]:.1f}" for kind in ("dense", "joint"))
        speed = 1e3 * values["batch_size"] / joint
        rows.append((title, f"{dense:.1f}", f"{joint:.1f}", f"{speed:,.0f}", *memory))
    header = ["network", "dense step, ms", "joint step, ms", "images a second, joint"]
    header += ["memory, dense, GiB", "memory, joint, GiB"]
    decode = benchmark("input_speed")
    per_core = decode["values"]["ours_decode_per_s"]
    sentence = f"One CPU core decodes and crops {per_core:.0f} images a second {origin(decode)}."
    return "\n\n".join([markdown_table(header, rows), origin(*results), sentence])


def plan_table() -> str:
    """Steps, decode cores and hours on several numbers of GPUs."""
    per_core, rows = benchmark("input_speed")["values"]["ours_decode_per_s"], []
    for title, file in MEASURED.items():
        result = benchmark(file)
        values = result["values"]
        alone, weights = step_milliseconds(values, "joint"), _weights(result["command"].split()[3])
        for machines, gpus in GPUS:
            summing = 1e3 * gradient_seconds(weights, machines, gpus)
            step = alone + summing
            speed = 1e3 * values["batch_size"] / step
            epoch = IMAGES / (speed * machines * gpus) / HOUR
            cells = f"{step:.1f}", f"{summing:.1f}", f"{speed:,.0f}", f"{speed / per_core:.1f}"
            hours = (f"{epochs * epoch:.2g}" for epochs in EPOCHS.values())
            rows.append((title, f"{machines} x {gpus}", *cells, *hours))
    header = ["network", "GPUs", "step, ms", "of it for gradients, ms"]
    header += ["images a second, each GPU", "decode cores, each GPU"]
    return markdown_table([*header, *(f"hours, {name}" for name in EPOCHS)], rows)


def step_milliseconds(values: dict[str, Any], kind: str) -> float:
    """A measured step of one GPU. Epochs of three batches mostly wait for images: not used."""
    return values["milliseconds_per_batch"][kind]["step"]


def gradient_seconds(weights: int, machines: int, gpus: int) -> float:
    """Summing gradients in a ring, which sends nearly all of them twice; none of it is hidden."""
    workers, speed = machines * gpus, WITHIN if machines == 1 else BETWEEN
    return 2 * (workers - 1) / workers * BYTES_A_GRADIENT * weights / speed


def _weights(preset: str) -> int:
    model = model_from_config(load_config(preset), CLASSES)
    return sum(p.numel() for p in model.parameters())
