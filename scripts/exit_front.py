"""What exits are worth: accuracy against mean MACs, from the checkpoints of cifar100_exits.

    python scripts/exit_front.py runs/cifar100_exits --data PATH

A classifier that looks first (a shallow embedding, or a narrow network) and a base network share no
weights, and learn alone even where one run trains both. So any two of the trained ones make a
model, and what it does follows from what each says of every image. For each cost, thresholds are
fitted on the held-out images, the pair is the one that is best there, and figures are those of the
test set.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_files import EXPERIMENTS

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import apply_overrides
from deepmoe.costs import count_costs, dense_macs
from deepmoe.data import open_data
from deepmoe.devices import autocast, choose_device, choose_precision
from deepmoe.errors import UserError
from deepmoe.evaluation import Answers, exit_for_macs
from deepmoe.files import write_atomically
from deepmoe.model import confidence
from deepmoe.results import with_origin

OUT = EXPERIMENTS / "cifar100_exits" / "front.json"
SEEDS = (0, 1, 2)
SETS = ("holdout", "test")
CLASSES = 100
VGG16 = ("3", "4_5", "6", "9", "12", "16", "20", "30", "40", "54", "80", "100")
RESNET18 = ("45", "75", "110")
EMBEDDINGS = ("vgg16_3", "vgg16_12", "vgg16_30")  # a run of each size
# Of dense vgg16.
SHARES = (
    *(0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.14, 0.16, 0.18),
    *(0.2, 0.21, 0.22, 0.23, 0.25, 0.27, 0.3, 0.33, 0.36, 0.4, 0.45, 0.5, 0.54, 0.6, 0.7, 0.8),
)
MILLIONS = (34, 72, 109)  # of MACs, of resnet18; the largest of three seeds has 110 alone


def collected(folder: Path, root: str) -> dict[str, np.ndarray]:
    """What every run's embedding and network say of held-out and test images."""
    found: dict[str, np.ndarray] = {}
    device = choose_device()
    for path in sorted(folder.glob("*/last.safetensors")):
        loaded, run = load_checkpoint(path, device), path.parent.name
        model, config = loaded.model.eval(), loaded.config
        size = loaded.info.size
        for name, holdout in zip(SETS, (config.data.holdout, 0), strict=True):
            data = apply_overrides(config, [f"data.root={root}", f"data.holdout={holdout}"]).data
            source = open_data(data, batch_size=500, device=device, info=loaded.info)
            rows = []
            precision = choose_precision(config.train.precision, device)
            with torch.inference_mode(), autocast(device, precision):
                for x_BCHW, labels in source.evaluation:
                    gates, early = model.route(x_BCHW)
                    logits = model.gating(model.network, x_BCHW, gates)
                    early = torch.zeros_like(logits) if early is None else early
                    figures = [labels]
                    for z in (early, logits):
                        figures += [z.argmax(dim=1), confidence(z)]
                    rows.append([figure.cpu() for figure in figures])
            for key, parts in zip(
                ("y", "ep", "ec", "p", "c"), zip(*rows, strict=True), strict=True
            ):
                found[f"{run}/{name}/{key}"] = torch.cat(parts).numpy()
        costs = count_costs(model, size)
        numbers = [costs.macs, dense_macs(model, size), costs.embedding_macs]
        found[f"{run}/costs"] = np.array(numbers)
    return found


class Front:
    """All models that the runs can be joined to.

    Args:
        found: as `collected` gives it.
    """

    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self.found = found

    def costs(self, run: str) -> tuple[int, int, int]:
        """MACs of the base network, of it before it was pruned, and of the embedding."""
        base, dense, embedding = self.found[f"{run}/costs"].tolist()
        return base, dense, embedding

    def right(self, run: str, images: str, answer: str = "p") -> torch.Tensor:
        """Which images a run's network (or, by `ep`, its embedding) gets right."""
        of = f"{run}/{images}"
        return torch.from_numpy(self.found[f"{of}/{answer}"] == self.found[f"{of}/y"])

    def joined(self, first: str, by: str, base: str, images: str) -> Answers:
        """The answers of two runs of one seed: one's embedding or network looks first."""
        answer, sure = ("ep", "ec") if by == "embedding" else ("p", "c")
        network, _, looking = self.costs(first)
        looks = looking if by == "embedding" else network
        goes_on, dense, _ = self.costs(base)
        right = self.right(base, images)
        unknown = torch.zeros(len(right))
        return Answers(
            confidence=torch.from_numpy(self.found[f"{first}/{images}/{sure}"]),
            early_right=self.right(first, images, answer),
            right=right,
            early_loss=unknown,
            loss=unknown,
            active=unknown,
            macs=torch.full_like(right, looks + goes_on, dtype=torch.int64),
            macs_without=torch.full_like(right, goes_on, dtype=torch.int64),
            embedding_macs=looks,
            dense_macs=dense,
            classes=CLASSES,
        )

    def static(self, group: str) -> dict[str, Any]:
        """A network alone."""
        runs = [f"{group}-seed{seed}" for seed in SEEDS]
        base, dense, embedding = map(statistics.fmean, zip(*map(self.costs, runs), strict=True))
        return {
            "run": group,
            "macs": base,
            "macs_share": base / dense,
            "accuracy": [self.right(run, "test").double().mean().item() for run in runs],
            "holdout_accuracy": [self.right(run, "holdout").double().mean().item() for run in runs],
            "embedding_macs": embedding,
            "embedding_accuracy": [
                self.right(run, "test", "ep").double().mean().item() for run in runs
            ],
        }

    def pair(self, first: str, by: str, base: str, macs: float) -> dict[str, Any] | None:
        """Two that make a model of this mean cost; `None` where they can't."""
        fitted, tested = [], []
        for seed in SEEDS:
            one, two = (f"{group}-seed{seed}" for group in (first, base))
            answers = self.joined(one, by, two, "holdout")
            try:
                fitted.append(exit_for_macs(answers, macs / answers.dense_macs))
            except UserError:
                return None
            tested.append(self.joined(one, by, two, "test").at(fitted[-1].threshold))
        return {
            "looks_first": first,
            "by": by,
            "base": base,
            "holdout_accuracy": [figures.accuracy for figures in fitted],
            "thresholds": [figures.threshold for figures in fitted],
            **{
                key: [getattr(figures, key) for figures in tested]
                for key in ("accuracy", "macs", "exited")
            },
        }

    def best(self, firsts: list[tuple[str, str]], bases: list[str], macs: float) -> dict[str, Any]:
        """For each kind of first look, the pair that is best on held-out images."""
        chosen: dict[str, Any] = {}
        for kind in ("embedding", "network"):
            pairs = [
                found
                for (first, by), base in itertools.product(firsts, bases)
                if by == kind and (by == "embedding" or self.cheaper(first, base))
                if (found := self.pair(first, by, base, macs)) is not None
            ]
            if pairs:
                best = max(pairs, key=lambda pair: statistics.fmean(pair["holdout_accuracy"]))
                chosen[kind] = {**best, "tried": len(pairs)}
        return chosen

    def cheaper(self, first: str, base: str) -> bool:
        """Whether a network costs less than another."""
        return self.costs(f"{first}-seed0")[0] < self.costs(f"{base}-seed0")[0]


def front(found: dict[str, np.ndarray]) -> dict[str, Any]:
    """All figures of the experiment."""
    runs = Front(found)
    embeddings = [(group, "embedding") for group in EMBEDDINGS]
    vgg16 = [f"vgg16_{share}" for share in VGG16]
    resnet18 = [f"resnet18_{millions}" for millions in RESNET18]
    dense = runs.costs("vgg16_100-seed0")[1]
    firsts = [*embeddings, *((group, "network") for group in vgg16)]
    others = [*firsts, *((group, "network") for group in resnet18)]
    return {
        "static": [runs.static(group) for group in [*vgg16, *resnet18]],
        "vgg16": [{"share": share, **runs.best(firsts, vgg16, share * dense)} for share in SHARES],
        "resnet18": [
            {"millions": millions, **runs.best(others, resnet18, millions * 1e6)}
            for millions in MILLIONS
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of the sweep's runs")
    parser.add_argument("--data", default="data", help="folder of CIFAR-100")
    parser.add_argument("--answers", type=Path, help="file to keep what the networks say in")
    parser.add_argument("--hardware", help="that the answers in the file come from")
    asked = parser.parse_args()
    if asked.answers is not None and asked.answers.exists():
        answers = dict(np.load(asked.answers))
    else:
        answers = collected(asked.runs, asked.data)
        if asked.answers is not None:
            np.savez_compressed(asked.answers, **answers)
    command = "python scripts/exit_front.py runs/cifar100_exits"
    result = with_origin(front(answers), command=command, seed=SEEDS[0], device=choose_device())
    # What the figures depend on is where the networks ran, not where their answers were joined.
    result |= {"seed": "0, 1, 2", "hardware": asked.hardware or result["hardware"]}
    write_atomically(OUT, (json.dumps(result, indent=2) + "\n").encode())
