"""By what a vote should be chosen: fitted on one half of the held-out images, judged on the other.

    python scripts/vote_criteria.py runs/cifar100_vote --data PATH --out criteria.json

Judged are images that go on where 40 % exit. The test set is not looked at.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from exit_front import EMBEDDING, NETWORK, SEEDS, Answerer, Front, write_figures
from torch import Tensor

from deepmoe.evaluation.exit_answers import VOTES, losses_by_temperature
from deepmoe.model import confidence

PAIRS = (
    (Answerer("vgg16_12", EMBEDDING), "vgg16_12"),
    (Answerer("vgg16_12", EMBEDDING), "vgg16_16"),
    (Answerer("vgg16_12", NETWORK), "vgg16_16"),
)
EXITED, DRAWS = 0.4, 10
Loss = Callable[[Tensor, Tensor], float]  # of logits and labels: the smallest is best
CRITERIA: dict[str, Loss] = {
    "cross-entropy": lambda z, y: F.cross_entropy(z, y).item(),
    "cross-entropy, calibrated": lambda z, y: losses_by_temperature(z, y).min().item(),
    "accuracy": lambda z, y: (z.argmax(dim=1) != y).double().mean().item(),
}


def judged(early: Tensor, late: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Accuracies on images that go on, by each criterion, for both halves of several draws."""
    sure, generator = confidence(early), torch.Generator().manual_seed(0)
    goes_on = sure < sure.quantile(1 - EXITED)
    found: dict[str, list[float]] = {"no vote": [], **{name: [] for name in CRITERIA}}
    for _ in range(DRAWS):
        one = torch.rand(len(labels), generator=generator) < 0.5
        for fit, rest in ((one, ~one), (~one, one)):
            seen = rest & goes_on
            for name, accuracies in found.items():
                vote = 0.0
                if name in CRITERIA:
                    vote = min(VOTES, key=_loss_on(CRITERIA[name], early, late, labels, fit))
                answers = torch.lerp(late, early, vote)[seen].argmax(dim=1)
                accuracies.append((answers == labels[seen]).double().mean().item())
    return found


def _loss_on(
    loss: Loss, early: Tensor, late: Tensor, labels: Tensor, images: Tensor
) -> Callable[[float], float]:
    return lambda vote: loss(torch.lerp(late, early, vote)[images], labels[images])


def criteria(runs: Front) -> list[dict[str, Any]]:
    """A row for each pair, with means over the seeds that are there."""
    rows = []
    for first, base in PAIRS:
        found: dict[str, list[float]] = {}
        seeds = [
            s for s in SEEDS if {f"{first.of(s)}/costs", f"{base}-seed{s}/costs"} <= {*runs.found}
        ]
        for seed in seeds:
            two = f"{base}-seed{seed}"
            early = runs.logits(first.of(seed), first.by, "holdout").cpu()
            late, labels = runs.logits(two, NETWORK, "holdout").cpu(), runs.labels(two, "holdout")
            for name, accuracies in judged(early, late, labels.cpu()).items():
                found.setdefault(name, []).extend(accuracies)
        means = {name: statistics.fmean(accuracies) for name, accuracies in found.items()}
        pair = {"first": first.group, "by": first.by, "base": base, "seeds": seeds}
        rows.append({**pair, "accuracy": means})
    return rows


if __name__ == "__main__":
    write_figures("vote_criteria.py", __doc__, criteria)
