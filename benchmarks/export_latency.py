"""How long one image takes in exported files: dense and pruned networks, random weights.

    python benchmarks/export_latency.py

Every group of channels loses the same share. Each file is timed in turn with the dense network, in
PyTorch and in the file's own runtime, as `deepmoe export` does it.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from deepmoe.checkpoint import Checkpoint, TrainState
from deepmoe.compare.widths import even_widths
from deepmoe.config import ModelConfig, RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.costs import count_costs, dense_macs
from deepmoe.data import DataInfo
from deepmoe.export import export_checkpoint
from deepmoe.export.formats import ENDINGS
from deepmoe.graph import prunable
from deepmoe.results import write_result

OUT = Path(__file__).with_name("export_latency.json")
NETWORKS = {"vgg16": (32, 100), "resnet18": (224, 1000), "resnet50": (224, 1000)}  # pixels, classes
SHARES = (1.0, 0.5, 0.25)  # of the dense MACs


def pruned(name: str, pixels: int, classes: int, share: float) -> Checkpoint:
    """A network of the zoo that keeps so much of its MACs, as a checkpoint would give it."""
    size = (pixels, pixels)
    config = RunConfig(model=ModelConfig(name, gates="none"))
    if share < 1:
        with torch.device("meta"):
            whole = model_from_config(config, classes, size=size)
        gating = prunable(whole.gating.graph)
        kept = even_widths(gating, size, share, [False] * len(gating.gated))
        config = RunConfig(model=ModelConfig(name, gates="none", kept=kept))
    model = model_from_config(config, classes, size=size).eval()
    info = DataInfo(tuple(map(str, range(classes))), size, (0.0,) * 3, (1.0,) * 3)
    return Checkpoint(model, config, info, TrainState(), {})


def measured(networks: Iterable[str], shares: Iterable[float]) -> list[dict[str, Any]]:
    """A row for each network, share and format."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in networks:
            for share in shares:
                loaded = pruned(name, *NETWORKS[name], share)
                size = loaded.info.size
                cost = count_costs(loaded.model, size).macs / dense_macs(loaded.model, size)
                for format, ending in ENDINGS.items():
                    path = Path(folder, f"{name}{ending}")
                    found = export_checkpoint(loaded, path, format=format).as_dict()
                    rows.append({"network": name, "macs_share": cost, **found, "path": path.name})
                    print(rows[-1]["network"], rows[-1]["format"], f"{cost:.0%}", found["ratio"])
    return rows


def main(arguments: Iterable[str] | None = None) -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    values = measured(options.networks, options.shares)
    command = f"python benchmarks/export_latency.py --threads {options.threads}"
    write_result(options.out, values, command=command, seed=0, device="cpu")


if __name__ == "__main__":
    main()
