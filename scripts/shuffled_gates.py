"""Gates of other classes in the trained networks of experiments/shuffle_small.

    python scripts/shuffled_gates.py runs/shuffle_small --data PATH

Adds a line for each run to the experiment's shuffling.jsonl, unless it has one. The figures are
those that `deepmoe analyze` writes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from result_files import EXPERIMENTS, shuffled

from deepmoe.checkpoint import load_checkpoint
from deepmoe.compare.method import changed
from deepmoe.data import DataSource, open_data
from deepmoe.devices import choose_device
from deepmoe.evaluation.findings import Asked, examine
from deepmoe.model import DeepMoE
from deepmoe.results import with_origin
from deepmoe.sweep import read_grid
from deepmoe.sweep.steps import last_checkpoint

FOLDER = EXPERIMENTS / "shuffle_small"
GRID, RESULTS = FOLDER / "grid.toml", FOLDER / "shuffling.jsonl"
SHUFFLED, OF_CLASS = 2000, "dolphin"
COMMAND = f"deepmoe analyze CHECKPOINT --shuffle {SHUFFLED} --class {OF_CLASS} --json"


def shuffled_gates(model: DeepMoE, source: DataSource) -> dict[str, Any]:
    """How right a network is under its own gates, and under those of other classes."""
    found = examine(model, source, Asked(shuffled=SHUFFLED, of_class=OF_CLASS)).as_dict()
    evaluation, routes = found["evaluation"], found["routes"]
    by_images = {"all": found["shuffling"], OF_CLASS: found["class_shuffling"]}
    of_evaluation = ("accuracy", "embedding_accuracy", "macs_share", "images")
    return {
        "evaluation": {key: evaluation[key] for key in of_evaluation},
        "routes": {key: routes[key] for key in ("distinct", "images")},
        **{name: shuffling["all"] for name, shuffling in by_images.items()},
        "draws": {name: shuffling["draws"] for name, shuffling in by_images.items()},
    }


def add_line(network: str, figures: dict[str, Any], *, command: str, seed: int) -> None:
    """Writes down what was found of a network."""
    values = {"network": network, **figures}
    line = with_origin(values, command=command, seed=seed, device=choose_device())
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Shuffles the gates of all runs that are in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of `deepmoe sweep`")
    parser.add_argument("--data", default="data", help="folder of CIFAR-100")
    asked = parser.parse_args()
    known = shuffled(FOLDER.name)
    for run in read_grid(GRID).runs:
        path, seed = last_checkpoint(asked.runs, run.name), run.config.train.seed
        if path.exists() and (run.group, seed) not in known:
            config = changed(run.config, {"data.root": asked.data})
            source = open_data(config.data, batch_size=config.train.batch_size)
            figures = shuffled_gates(load_checkpoint(path).model.to(choose_device()), source)
            add_line(run.group, figures, command=COMMAND, seed=seed)


if __name__ == "__main__":
    main()
