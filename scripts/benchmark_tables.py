"""The tables of speed."""

from typing import Any

from result_files import BENCHMARKS, benchmark, origin

from deepmoe.results import markdown_table


def train_speed_table() -> str:
    """Seconds a training epoch, and where the time of a batch goes."""
    names = {"vgg16": "yes", "resnet56": "yes", "vgg16_without_graphs": "no"}
    results = [benchmark(f"train_speed_{name}") for name in names]
    epochs, kernels, phases = [], [], []
    for graphs, values in zip(names.values(), (r["values"] for r in results), strict=True):
        for kind, seconds in values["seconds_per_epoch"].items():
            low, high = values["spread"][kind]
            times = f"{seconds:.2f}", f"{low:.2f} to {high:.2f}"
            ratio = values["ratio_to_dense"].get(kind, 1.0)
            epochs.append((values["model"], graphs, kind, *times, f"{ratio:.2f}"))
            by_kernel = values.get("gpu_milliseconds_per_batch")
            spent = (by_kernel or values["milliseconds_per_batch"])[kind]
            rows = phases if by_kernel is None else kernels
            rows.append({"network": values["model"], "kind": kind, **spent})
    header = ["network", "CUDA graphs", "kind", "seconds an epoch", "spread", "of dense"]
    return "\n\n".join(
        [
            markdown_table(header, epochs),
            "Milliseconds a batch with CUDA graphs, by kind of kernel:",
            _milliseconds_table(kernels),
            "Milliseconds a batch without them, by phase:",
            _milliseconds_table(phases),
            *map(origin, results),
        ]
    )


def _milliseconds_table(rows: list[dict[str, Any]]) -> str:
    cells = [[c if isinstance(c, str) else f"{c:.2f}" for c in row.values()] for row in rows]
    return markdown_table(list(rows[0]), cells)


def input_speed_table() -> str:
    """Decoded training images a second on one core."""
    result = benchmark("input_speed")
    values = result["values"]
    rows = [
        ("decode and crop, as in our workers", values["ours_decode_per_s"], values["ratio_decode"]),
        ("the same, mirror, jitter, normalise", values["ours_total_per_s"], values["ratio_total"]),
        (f"torchvision {values['torchvision']}", values["torchvision_per_s"], 1.0),
    ]
    lines = [(name, f"{rate:.0f}", f"{ratio:.2f}") for name, rate, ratio in rows]
    header = ["pipeline", "images a second", "of torchvision's"]
    return f"{markdown_table(header, lines)}\n\n{origin(result)}"


SPARSE_COLUMNS = {
    "dense_wide": "dense wide",
    "dense_base": "dense base",
    "presliced": "sliced before",
    "dynamic": "dynamic",
    "codebook": "codebook",
}
PACKED_COLUMNS = {"dense_wide_packed": "dense wide, packed", "presliced_packed": "sliced, packed"}


def sparse_table(device: str) -> str:
    """What skipped channels save in inference, on one kind of device."""
    paths = sorted(BENCHMARKS.glob(f"sparse_{device}_*.json"))
    results = [benchmark(path.stem) for path in paths]
    times, gains = [], []
    for result in results:
        v = result["values"]
        case = (result["command"].split()[3], v["batch"], f"{v['density']:.2f}", v["codes"])
        times.append((*case, *(_milliseconds(v, key) for key in SPARSE_COLUMNS)))
        fast = [f"{v['dense_wide_ms'] / v[f'{m}_ms']:.2f}" for m in ("dynamic", "codebook")]
        gains.append((*case, *fast, *(_milliseconds(v, key) for key in PACKED_COLUMNS)))
    header = ["network, wide 2", "batch", "density", "codes"]
    both = [
        markdown_table([*header, *SPARSE_COLUMNS.values()], times),
        "How many times as fast as dense wide, and the packed networks:",
        markdown_table([*header, "dynamic", "codebook", *PACKED_COLUMNS.values()], gains),
    ]
    return "\n\n".join([*both, *map(origin, results)])


def sparse_grid_table(device: str) -> str:
    """Time against density and batch size."""
    result = benchmark(f"sparse_grid_{device}")
    keys = ("dense_wide", "presliced", "masked", "dynamic", "codebook")
    rows = [
        (v["batch"], f"{v['density']:.2f}", *(f"{v[f'{key}_ms']:.2f}" for key in keys))
        for v in result["values"]
    ]
    header = ["batch", "density", "dense", "sliced before", "masked", "dynamic", "codebook"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def sparse_profile_cpu_table() -> str:
    """Where the dynamic mode's time goes on a CPU, layer by layer."""
    result = benchmark("profile_sparse_cpu")
    keys = ("total_ms", "kernels_ms", "packed_ms")
    rows = [
        (path, v["way"], *(f"{v[key]:.2f}" for key in keys))
        for path, v in result["values"]["layers"].items()
    ]
    rows.append(("all", "", f"{result['values']['total_ms']:.2f}", "", ""))
    header = ["layer", "way", "dynamic, ms", "of that in kernels", "packed"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)} ({result['command']})"


def sparse_profile_gpu_table() -> str:
    """Where the codebook mode's time goes on a GPU."""
    result = benchmark("profile_sparse_gpu")
    rows = [(part, f"{ms:.2f}") for part, ms in result["values"].items()]
    return f"{markdown_table(['part', 'ms'], rows)}\n\n{origin(result)} ({result['command']})"


def cpu_kernels_table() -> str:
    """What each CPU kernel of the sparse engine is worth; nothing until that is measured."""
    if not (BENCHMARKS / "cpu_kernels.json").exists():
        return ""
    result = benchmark("cpu_kernels")
    rows = [
        (v["network"], f"{v['density']:.2f}", *(f"{ms:.2f}" for ms in v["median_ms"].values()))
        for v in result["values"]
    ]
    header = ["network", "density", *result["values"][0]["median_ms"]]
    about = (
        "What each kernel is worth: dynamic mode, the engine left with fewer ways. Milliseconds "
        "for one image, medians of interleaved runs:"
    )
    origins = f"{origin(result)} (`{result['command']}`)"
    return "\n\n".join([about, markdown_table(header, rows), origins])


def other_networks_table() -> str:
    """What gating is worth in networks of other packages."""
    result = benchmark("other_networks")
    rows = [
        (
            *v["network"].split(" ", 1),
            f"{v['macs_share']:.0%}",
            f"{min(v['median_ms']['dense'], v['median_ms']['dense_channels_last']):.0f}",
            f"{v['median_ms']['engine_dense']:.0f}",
            f"{v['median_ms']['sparse']:.0f}",
            f"{v['times_as_fast']:.2f}",
            f"{v['by_skipping']:.2f}",
        )
        for v in result["values"]
    ]
    header = ["package", "network", "MACs of a route", "PyTorch, ms", "engine, all channels, ms"]
    header += ["engine, half, ms", "times as fast", "of that by skipping"]
    about = (
        "One image of 224 px, one thread, half of the channels inside of residual blocks open, "
        "random weights. *PyTorch* is the network as its package makes it, in the faster of both "
        "memory formats. *By skipping* compares the engine with all channels and with half of "
        "them; the rest of the gain is due to its fused calls. Medians of interleaved runs:"
    )
    origins = f"{origin(result)} (`{result['command']}`)"
    return "\n\n".join([about, markdown_table(header, rows), origins])


def one_call_table() -> str:
    """What it is worth to run a small network's convolutions by one call."""
    result, rows = benchmark("one_call"), []
    for v in result["values"]:
        if "share" in v:
            ms = [v["ms"][way] for way in ("library", "chained")]
            cells = (*(f"{t:.2f}" for t in ms), f"{ms[0] / ms[1]:.2f}")
            rows.append((f"{v['share']:.0%}", v["threads"], *cells))
    header = ["vgg16, of dense MACs", "threads", "a call a layer, ms", "one call, ms"]
    return f"{markdown_table([*header, 'times as fast'], rows)}\n\n{origin(result)}"


def one_call_exits_table() -> str:
    """The same for a narrow network in front of a wide one."""
    result, rows = benchmark("one_call"), []
    for v in result["values"]:
        if "first" in v:
            alone, *ms = (v["ms"][way] for way in ("second stage alone", "library", "chained"))
            cells = [t for time in ms for t in (f"{time:.2f}", f"{time / alone - 1:+.0%}")]
            rows.append((v["threads"], f"{v['exited']:.0%}", f"{alone:.2f}", *cells))
    header = ["threads", "exit rate", "without exits, ms", "with exits, a call a layer, ms"]
    header += ["change", "with exits, one call, ms", "change"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def export_latency_table() -> str:
    """What pruning is worth in exported files."""
    result = benchmark("export_latency")
    rows = [
        (
            v["network"],
            f"{v['macs_share']:.0%}",
            v["runtime"],
            f"{v['ms'] / v['ratio']:.1f}",
            f"{v['ms']:.1f}",
            f"{1 / v['ratio']:.2f}",
            f"{v['bytes'] / 1e6:.1f}",
        )
        for v in result["values"]
        if v["macs_share"] < 1
    ]
    header = ["network", "of dense MACs", "runtime", "dense ms", "file ms", "times as fast", "MB"]
    return f"{markdown_table(header, rows)}\n\n{origin(result)}"


def resume_gpu_table() -> str:
    """How exactly resumed runs repeat on a GPU; nothing until that is measured.

    The file holds one mapping of texts and numbers for each case, by its name.
    """
    if not (BENCHMARKS / "resume_gpu.json").exists():
        return ""
    result = benchmark("resume_gpu")
    cases = result["values"]
    rows = [(name, *case.values()) for name, case in cases.items()]
    header = ["case", *next(iter(cases.values()))]
    return f"On a GPU:\n\n{markdown_table(header, rows)}\n\n{origin(result)}"


def _milliseconds(values: dict[str, Any], key: str) -> str:
    low, high = values["spread_ms"][key]
    return f"{values[f'{key}_ms']:.2f} ({low:.2f} to {high:.2f})"
