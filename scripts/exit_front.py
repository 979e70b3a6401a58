"""What exits are worth: accuracy against mean MACs, from the checkpoints of a sweep.

    python scripts/exit_front.py runs/cifar100_vote --data PATH --out front.json

A classifier that looks first (a shallow embedding, or a narrow network) and a base network share no
weights, and learn alone even where one run trains both. So any two of the trained ones make a
model, and what it does follows from what each says of every image. For each cost, thresholds are
fitted on the held-out images, the pair is the one that is best there, and figures are those of the
test set.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import apply_overrides
from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.data import open_data
from deepmoe.devices import autocast, choose_device, choose_precision
from deepmoe.errors import UserError
from deepmoe.evaluation import Answers, exit_for_macs
from deepmoe.evaluation.exit_answers import (
    VOTES,
    ExitFigures,
    best_vote,
    losses_by_temperature,
)
from deepmoe.files import is_newer, write_atomically
from deepmoe.model import confidence, joint_answer
from deepmoe.results import with_origin

SEEDS = (0, 1, 2)
SETS = ("holdout", "test")
NETWORK, EMBEDDING = "network", "embedding"
VGG16 = ("3", "4_5", "6", "9", "12", "16", "20", "30", "40", "54", "80", "100")
RESNET18 = ("45", "75", "110", "150")
EMBEDDINGS = ("vgg16_3", "vgg16_12", "vgg16_30")  # a run of each size
# Of dense vgg16.
SHARES = (
    *(0.03, 0.04, 0.05, 0.06, 0.075, 0.09, 0.1, 0.11, 0.12, 0.14, 0.16, 0.18),
    *(0.2, 0.23, 0.25, 0.27, 0.3, 0.35, 0.4, 0.45, 0.54, 0.65, 0.8),
)
MILLIONS = (34, 72, 109, 125)  # of MACs, of resnet18


def answers_of(checkpoint: Path, root: str) -> dict[str, np.ndarray]:
    """Logits of a run's embedding and network for held-out and test images, labels, and costs."""
    device, found, spent = choose_device(), {}, {}
    loaded = load_checkpoint(checkpoint, device)
    model, config = loaded.model.eval(), loaded.config
    precision = choose_precision(config.train.precision, device)
    for name, holdout in zip(SETS, (config.data.holdout, 0), strict=True):
        data = apply_overrides(config, [f"data.root={root}", f"data.holdout={holdout}"]).data
        source = open_data(data, batch_size=500, device=device, info=loaded.info)
        rows, spent[name] = [], []
        with torch.inference_mode(), autocast(device, precision):
            for x_BCHW, labels in source.evaluation:
                gates, early = model.route(x_BCHW)
                if gates is not None:
                    spent[name].append(count_macs(model, loaded.info.size, gates).double().cpu())
                logits = model.gating(model.network, x_BCHW, gates)
                # In half precision, which holds all that the networks give.
                answers = (logits, logits if early is None else early)
                rows.append([z.half().cpu() for z in answers] + [labels.cpu()])
        for key, parts in zip((NETWORK, EMBEDDING, "y"), zip(*rows, strict=True), strict=True):
            found[f"{name}/{key}"] = torch.cat(parts).numpy()
    costs = count_costs(model, loaded.info.size)
    # What gates ask for differs from image to image, and is with all that finds it out.
    own = round(torch.cat(spent["test"]).mean().item()) if spent["test"] else costs.macs
    numbers = [own, dense_macs(model, loaded.info.size), costs.embedding_macs]
    return {**found, "costs": np.array(numbers)}


def keep_answers(checkpoint: Path, root: str) -> Path:
    """The file of a run's answers beside its checkpoint; made where there is none."""
    kept = checkpoint.with_name("answers.npz")
    if not is_newer(kept, checkpoint):
        np.savez_compressed(kept, **answers_of(checkpoint, root))
    return kept


def collected(folder: Path, root: str, jobs: int = 1) -> dict[str, np.ndarray]:
    """The answers of all runs; several processes may ask for them side by side."""
    found: dict[str, np.ndarray] = {}
    checkpoints = sorted(folder.glob("*/last.safetensors"))
    if jobs > 1:  # each leaves a file, which is found below
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            pool.starmap(keep_answers, [(path, root) for path in checkpoints], chunksize=1)
    for checkpoint in checkpoints:
        answers = np.load(keep_answers(checkpoint, root))
        found |= {f"{checkpoint.parent.name}/{key}": value for key, value in answers.items()}
    return found


@dataclass(frozen=True)
class Answerer:
    """A network, or the embedding beside it, of all seeds of a run."""

    group: str
    by: str  # NETWORK or EMBEDDING

    def of(self, seed: int) -> str:
        """The run of a seed."""
        return f"{self.group}-seed{seed}"


class Front:
    """All models that the runs can be joined to.

    Args:
        found: as `collected` gives it.
    """

    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self.found = found
        self.device = choose_device()

    @property
    def names(self) -> list[str]:
        """Of all runs."""
        return sorted({key.partition("/")[0] for key in self.found})

    def __contains__(self, group: str) -> bool:
        """Whether a run was trained with all seeds."""
        return all(f"{group}-seed{seed}/costs" in self.found for seed in SEEDS)

    def costs(self, run: str) -> tuple[int, int, int]:
        """MACs of the base network, of it before it was pruned, and of the embedding."""
        base, dense, embedding = self.found[f"{run}/costs"].tolist()
        return base, dense, embedding

    @cache  # noqa: B019
    def logits(self, run: str, by: str, images: str) -> torch.Tensor:
        """What a network or embedding says of a set of images."""
        return torch.from_numpy(self.found[f"{run}/{images}/{by}"]).float().to(self.device)

    @cache  # noqa: B019
    def labels(self, run: str, images: str) -> torch.Tensor:
        """The right answers."""
        return torch.from_numpy(self.found[f"{run}/{images}/y"]).to(self.device)

    def accuracy(self, run: str, images: str, by: str = NETWORK) -> float:
        """Of a network or embedding alone."""
        right = self.logits(run, by, images).argmax(dim=1) == self.labels(run, images)
        return right.double().mean().item()

    @cache  # noqa: B019
    def joined(self, first: Answerer, base: str, seed: int, images: str, vote: float) -> Answers:
        """The answers of two runs of one seed, one of which looks first."""
        one, two = first.of(seed), f"{base}-seed{seed}"
        network, _, embedding = self.costs(one)
        looks = embedding if first.by == EMBEDDING else network
        goes_on, dense, _ = self.costs(two)
        early, late = self.logits(one, first.by, images), self.logits(two, NETWORK, images)
        labels = self.labels(two, images)
        joint = joint_answer(late, early, late.new_tensor(vote))
        right, early_right, joint_right = (
            (z.argmax(dim=1) == labels).cpu() for z in (late, early, joint)
        )
        unknown = torch.zeros(len(right))
        return Answers(
            confidence=confidence(early).cpu(),
            early_right=early_right,
            right=right,
            joint_right=joint_right,
            early_loss=unknown,
            loss=unknown,
            joint_loss=unknown,
            vote=vote,
            active=unknown,
            macs=torch.full_like(right, looks + goes_on, dtype=torch.int64),
            macs_without=torch.full_like(right, goes_on, dtype=torch.int64),
            embedding_macs=looks,
            dense_macs=dense,
            classes=late.shape[1],
        )

    @cache  # noqa: B019
    def vote(self, first: Answerer, base: str, seed: int) -> float:
        """How much the first stage counts where both answer, as `deepmoe exits` fits it."""
        one, two = first.of(seed), f"{base}-seed{seed}"
        early, late = self.logits(one, first.by, "holdout"), self.logits(two, NETWORK, "holdout")
        labels = self.labels(two, "holdout")
        joint = [joint_answer(late, early, late.new_tensor(vote)) for vote in VOTES]
        losses_VT = torch.stack([losses_by_temperature(z, labels) for z in joint])
        hits_V = torch.stack([(z.argmax(dim=1) == labels).sum() for z in joint])
        return VOTES[best_vote(losses_VT, hits_V, hits_V[0])]

    def static(self, group: str) -> dict[str, Any]:
        """A network alone."""
        runs = [f"{group}-seed{seed}" for seed in SEEDS]
        base, dense, embedding = map(statistics.fmean, zip(*map(self.costs, runs), strict=True))
        return {
            "run": group,
            "macs": base,
            "macs_share": base / dense,
            "accuracy": [self.accuracy(run, "test") for run in runs],
            "holdout_accuracy": [self.accuracy(run, "holdout") for run in runs],
            "embedding_macs": embedding,
            "embedding_accuracy": [self.accuracy(run, "test", EMBEDDING) for run in runs],
        }

    def fitted(
        self, first: Answerer, base: str, macs: float, *, votes: bool
    ) -> list[ExitFigures] | None:
        """Two that make a model of this mean cost, on held-out images; `None` where they can't."""
        found = []
        for seed in SEEDS:
            vote = self.vote(first, base, seed) if votes else 0.0
            answers = self.joined(first, base, seed, "holdout", vote)
            try:
                found.append(exit_for_macs(answers, macs / answers.dense_macs))
            except UserError:
                return None
        return found

    def tested(self, first: Answerer, base: str, fitted: list[ExitFigures]) -> dict[str, Any]:
        """The same on the test set."""
        found = [
            self.joined(first, base, seed, "test", figures.vote).at(figures.threshold)
            for seed, figures in zip(SEEDS, fitted, strict=True)
        ]
        return {
            "looks_first": first.group,
            "by": first.by,
            "base": base,
            "holdout_accuracy": [figures.accuracy for figures in fitted],
            "thresholds": [figures.threshold for figures in fitted],
            "votes": [figures.vote for figures in fitted],
            **{
                key: [getattr(figures, key) for figures in found]
                for key in ("accuracy", "macs", "exited")
            },
        }

    def best(self, firsts: Sequence[Answerer], bases: Sequence[str], macs: float) -> dict[str, Any]:
        """For each kind of first stage, the pair that is best on held-out images.

        `without_vote` is the best one where the first stage has no say in what goes on.
        """
        chosen: dict[str, Any] = {}
        for kind, votes in itertools.product((EMBEDDING, NETWORK), (True, False)):
            pairs = {
                (first, base): fitted
                for first, base in itertools.product(firsts, bases)
                if first.by == kind and (kind == EMBEDDING or self.cheaper(first.group, base))
                if (fitted := self.fitted(first, base, macs, votes=votes)) is not None
            }
            if pairs:
                best = max(pairs, key=lambda pair: _mean_accuracy(pairs[pair]))
                name = kind if votes else f"{kind}_without_vote"
                chosen[name] = {**self.tested(*best, pairs[best]), "tried": len(pairs)}
        return chosen

    def cheaper(self, first: str, base: str) -> bool:
        """Whether a network costs less than another."""
        return self.costs(f"{first}-seed0")[0] < self.costs(f"{base}-seed0")[0]


def _mean_accuracy(figures: Sequence[ExitFigures]) -> float:
    return statistics.fmean(f.accuracy for f in figures)


def front(runs: Front) -> dict[str, Any]:
    """All figures of the experiment, of the runs that are there."""
    vgg16 = [name for share in VGG16 if (name := f"vgg16_{share}") in runs]
    resnet18 = [name for millions in RESNET18 if (name := f"resnet18_{millions}") in runs]
    embeddings = [Answerer(group, EMBEDDING) for group in EMBEDDINGS if group in runs]
    dense = runs.costs(f"{vgg16[0]}-seed0")[1]
    firsts = [*embeddings, *(Answerer(group, NETWORK) for group in vgg16)]
    others = [*firsts, *(Answerer(group, NETWORK) for group in resnet18)]
    return {
        "static": [runs.static(group) for group in [*vgg16, *resnet18]],
        "starts": [runs.static(group) for group in ("vgg16", "resnet18") if group in runs],
        "vgg16": [{"share": share, **runs.best(firsts, vgg16, share * dense)} for share in SHARES],
        "resnet18": [
            {"millions": millions, **runs.best(others, resnet18, millions * 1e6)}
            for millions in MILLIONS
        ],
    }


def write_figures(script: str, about: str, figures_of: Callable[[Front], Any]) -> None:
    """Finds figures of a sweep's runs, as the command line asks for it, and writes them to a file.

    Args:
        script: that is called.
        about: what it does.
        figures_of: gives them.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of the sweep's runs")
    parser.add_argument("--data", default="data", help="folder of CIFAR-100")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--jobs", type=int, default=1, help="checkpoints evaluated at once")
    asked = parser.parse_args()
    figures = figures_of(Front(collected(asked.runs, asked.data, asked.jobs)))
    command = f"python scripts/{script} runs/{asked.runs.resolve().name}"
    result = with_origin(figures, command=command, seed=SEEDS[0], device=choose_device())
    result["seed"] = ", ".join(map(str, SEEDS))
    write_atomically(asked.out, (json.dumps(result, indent=2) + "\n").encode())


if __name__ == "__main__":
    write_figures("exit_front.py", __doc__, front)
