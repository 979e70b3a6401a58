"""A loss that is certified: the bound is exact, and it holds over draws of images."""

import dataclasses

import numpy as np
import pytest
import torch
from made_up_answers import answers
from scipy.stats import binom

from deepmoe.errors import UserError
from deepmoe.evaluation import Answers, exit_certified, exit_for_loss


def spoiling(count: int, images: int = 5000) -> Answers:
    """All are answered rightly by the network, and by the embedding all but some at 0.9."""
    sure = torch.full((images,), 0.5)
    sure[:1000], sure[1000 : 1000 + count] = 0.95, 0.9
    early = torch.ones(images, dtype=torch.bool)
    early[1000 : 1000 + count] = False
    return answers(sure, early, torch.ones(images, dtype=torch.bool))


def test_a_loss_is_certified_by_an_exact_bound() -> None:
    assert binom.cdf(38, 5000, 0.01) <= 0.05 < binom.cdf(39, 5000, 0.01)
    passes, fails = (exit_certified(spoiling(count), 1, 0.95) for count in (38, 39))
    assert (passes.threshold, passes.exited, passes.spoilt) == (0, 1, 38)
    # The last that is certified, not the first that is not.
    assert fails.threshold == pytest.approx(0.901) and fails.spoilt == 0
    assert fails.exited == 1000 / 5000
    # Neither the images that the network has wrong anyway nor a gain elsewhere count.
    wrong = spoiling(39)
    network = wrong.right.clone()
    network[1000], network[2000:2100] = False, False
    assert exit_certified(dataclasses.replace(wrong, right=network), 1, 0.95).exited == 1


class Wavering(Answers):
    """Spoils too many at one threshold alone, which no real answers do."""

    def at(self, threshold: float):
        spoilt = 39 if threshold == 0.8 else 0
        return dataclasses.replace(super().at(threshold), spoilt=spoilt)


def test_nothing_is_certified_beyond_the_first_failure() -> None:
    plain = spoiling(0)
    found = Wavering(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)})
    assert exit_certified(found, 1, 0.95).threshold == pytest.approx(0.801)


def test_what_can_not_be_certified_gets_one_sentence() -> None:
    with pytest.raises(UserError, match="on 298 images: even without a mistake, 299 are needed"):
        exit_certified(spoiling(0, 298), 1, 0.95)
    assert exit_certified(spoiling(0, 299), 1, 0.95).spoilt == 0
    blunt = spoiling(0)
    surest = dataclasses.replace(blunt, confidence=blunt.confidence.clone())
    surest.confidence[:100] = 1.0
    surest.early_right[:100] = False
    with pytest.raises(UserError, match="even among those it is most confident of"):
        exit_certified(surest, 1, 0.95)
    for points, guarantee, words in (
        (0, 0.95, "between 0 and 100 points"),
        (100, 0.95, "between 0 and 100 points"),
        (1, 0, "probability between 0 and 1"),
        (1, 1, "probability between 0 and 1"),
        (float("nan"), 0.5, "between 0 and 100"),
    ):
        with pytest.raises(UserError, match=words):
            exit_certified(blunt, points, guarantee)


def test_the_guarantee_holds_over_draws_of_images(monkeypatch) -> None:
    """Of a population where an image is spoilt with probability 0.2 (1 - confidence)."""
    monkeypatch.setattr("deepmoe.evaluation.exits.CERTIFIED_STEPS", 50)
    rng, images, limit = np.random.default_rng(0), 400, 0.04

    def risk(threshold: float) -> float:
        return 0.1 * (1 - threshold) ** 2

    risks: dict[str, list[float]] = {"certified": [], "plain": []}
    for _ in range(200):
        sure = rng.random(images)
        spoilt = rng.random(images) < 0.2 * (1 - sure)
        found = answers(torch.from_numpy(sure), torch.from_numpy(~spoilt), [True] * images)
        risks["certified"].append(risk(exit_certified(found, 100 * limit, 0.95).threshold))
        risks["plain"].append(risk(exit_for_loss(found, 100 * limit).threshold))
    broken = {name: np.mean(np.array(values) > limit) for name, values in risks.items()}
    assert 0 < broken["certified"] <= 0.05 + 2 * (0.05 * 0.95 / 200) ** 0.5
    assert broken["plain"] > 0.3  # what the guarantee is there for
    assert np.mean(risks["certified"]) > 0.4 * limit  # not by being timid
