"""When the embedding answers itself: what a threshold does, and how one is found."""

import pytest
import torch
from made_up_answers import answers

from deepmoe.errors import UserError
from deepmoe.evaluation import Answers, ExitFigures, exit_certified, exit_for_loss, exit_for_macs


def random_answers(
    images: int = 60, dtype: torch.dtype = torch.float32, ties: bool = False, votes: bool = False
) -> Answers:
    sure = torch.rand(images, dtype=dtype)
    sure = (sure * 10).round() / 10 if ties else sure
    early, right = torch.rand(images) < 0.3 + 0.6 * sure, torch.rand(images) < 0.8
    joint = (torch.rand(images) < 0.85).tolist() if votes else None
    return answers(sure, early, right, torch.randint(20, 100, (images,)), joint)


def test_what_a_threshold_does() -> None:
    found = answers(
        [0.9, 0.5, 0.7, 0.5],
        [True, False, True, False],
        [True, True, False, True],
        [100, 80, 60, 40],
    )
    none, some, every = (found.at(threshold) for threshold in (2.0, 0.7, 0.5))
    assert [f.exited for f in (none, some, every)] == [0, 0.5, 1]  # from 0.7 on: 0.7 is answered
    assert [f.accuracy for f in (none, some, every)] == [0.75, 1, 0.5]
    assert [f.loss for f in (none, some, every)] == [0, -0.25, 0.25]
    assert [f.spoilt for f in (none, some, every)] == [0, 0, 2]
    assert [f.macs for f in (none, some, every)] == [70, (10 + 80 + 10 + 40) / 4, 10]
    for figures in (none, some, every):
        assert (figures.images, figures.accuracy_without, figures.macs_without) == (4, 0.75, 60)
    values = some.as_dict()
    assert values["macs_share"] == 35 / 90 and values["macs_share_without"] == 60 / 90
    assert values["loss"] == -0.25 and values["threshold"] == pytest.approx(0.7)
    assert [f.loss_error for f in (none, some)] == [0, pytest.approx((3 / 16) ** 0.5 / 2)]


def test_images_that_go_on_get_the_answer_of_both() -> None:
    found = answers(
        [0.9, 0.8, 0.3, 0.2],
        [True, False, False, True],
        [True, False, False, True],
        joint=[False, True, True, False],
    )
    assert found.at(0.9).accuracy == 0.75 and found.at(0.9).accuracy_without == 0.5
    assert (found.at(0.9).vote, found.at(2.0).accuracy) == (0.5, 0.5)
    assert found.evaluation(1.01).accuracy == 0.5  # without exits, the network answers alone
    assert exit_for_loss(found, 0).exited == 1


def test_any_threshold_above_one_is_never() -> None:
    found = answers([1.0, 0.5], [True, True], [False, True])
    never = found.evaluation(1 + 1e-9)  # in single precision that is 1, which an image reaches
    assert never == found.evaluation(2.0) != found.evaluation(1.0)
    assert (never.exited, never.accuracy) == (0, 0.5)


KINDS = {
    "single": {},
    "double": {"dtype": torch.float64},
    "ties": {"ties": True},
    "votes": {"votes": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def least_sure(found: Answers, figures: ExitFigures) -> float:
    """Of the images that exit."""
    return float(found.confidence[found.confidence >= figures.threshold].min())


@every_kind
def test_a_cost_is_met_and_no_higher_threshold_meets_it(kind: dict) -> None:
    for _ in range(10):
        found = random_answers(**kind)
        levels = found.confidence.unique().tolist()
        for share in (0.12, 0.2, 0.3, 0.4):
            figures = exit_for_macs(found, share)
            assert figures.macs <= share * 90
            higher = [level for level in levels if level > least_sure(found, figures)]
            assert found.at(min(higher, default=2.0)).macs > share * 90
            assert figures == found.at(figures.threshold)


@every_kind
def test_a_loss_is_kept_and_no_lower_threshold_keeps_it(kind: dict) -> None:
    tried = 0
    for _ in range(10):
        found = random_answers(**kind)
        levels = found.confidence.unique().tolist()
        for points in (0, 2, 5, 10):
            kept = [level for level in levels if found.at(level).loss <= points / 100 + 1e-9]
            if not kept:
                with pytest.raises(UserError, match="every threshold loses more than"):
                    exit_for_loss(found, points)
                continue
            figures = exit_for_loss(found, points)
            assert least_sure(found, figures) == min(kept)
            assert figures == found.at(figures.threshold)
            tried += 1
    assert tried > 20


def test_a_loss_may_be_made_up_for_by_images_that_are_less_sure() -> None:
    found = answers([0.9, 0.8, 0.7, 0.6], [False, True, True, False], [True, False, True, True])
    assert exit_for_loss(found, 0).exited == 0.75
    # A threshold takes all images that tie, or none.
    tied = answers([0.9, 0.8, 0.8, 0.6], [False, True, False, False], [True, False, True, True])
    with pytest.raises(UserError, match="every threshold loses more than 0 points on these 4"):
        exit_for_loss(tied, 0)
    assert exit_for_loss(tied, 25).exited == 0.75
    for wrong in (-1, 101, float("nan")):
        with pytest.raises(UserError, match="from 0 to 100 points"):
            exit_for_loss(tied, wrong)


def test_rounding_does_not_decide_over_the_image_that_a_threshold_was_found_for() -> None:
    """Other batches, the sparse engine and exported files give it another last digit."""
    near = [0.9, 0.7, 0.69999, 0.3]
    early, right = [True, True, False, False], [True] * 4
    found = answers(near, early, right)
    for choose in (lambda f: exit_for_loss(f, 0), lambda f: exit_for_macs(f, 60 / 90)):
        figures = choose(found)
        assert figures.exited == 0.5
        assert 0.69999 + 1e-6 < figures.threshold < 0.7 - 1e-6
    apart = answers([0.9, 0.7, 0.3, 0.2], early, right)
    assert 0.7 - 2e-4 < exit_for_loss(apart, 0).threshold < 0.7 - 5e-5
    # Where no number lies between two images, each keeps its own side.
    one = torch.ones(1)
    tight = torch.cat([one, torch.nextafter(one, 0 * one)])
    for level in tight:
        lower = torch.nextafter(level, torch.tensor(0.0))
        found = answers(torch.stack([level, lower]), [True, False], [True, True])
        assert exit_for_loss(found, 0).exited == 0.5


def test_a_handful_of_images_is_told_from_an_embedding_that_guesses() -> None:
    found = answers([0.9], [True], [True], classes=10)
    with pytest.raises(UserError, match=r"too few images \(1\) .* 10 classes: hold out more"):
        exit_for_loss(found, 1)
    two = answers([0.9, 0.8], [True, True], [True, True], classes=10)
    assert exit_for_loss(two, 1).exited == 1
    with pytest.raises(UserError, match=r"100\.0% of the images, no better than guessing"):
        exit_for_loss(answers([0.9] * 9, [True] * 9, [True] * 9, classes=1), 1)


def test_costs_out_of_reach_get_one_sentence() -> None:
    found = answers([0.9, 0.5], [True, True], [True, True], [60, 80])
    for share in (0.1, 60 / 90, 5.0, float("nan")):  # 60 of 90: what the base network costs alone
        with pytest.raises(UserError, match=r"costs 0\.667 without them, and 0\.111 if all"):
            exit_for_macs(found, share)
    assert exit_for_macs(found, 10 / 90).exited == 1


def test_an_embedding_that_guesses_gets_one_sentence() -> None:
    right = torch.rand(400) < 0.9
    for hits, guesses in ((45, True), (80, False)):
        early = torch.arange(400) < hits
        found = answers(torch.rand(400), early, right, classes=10)
        for choose in (
            lambda found: exit_for_macs(found, 0.5),
            lambda found: exit_for_loss(found, 50),
            lambda found: exit_certified(found, 60, 0.9),
        ):
            if not guesses:
                assert choose(found).exited > 0
                continue
            with pytest.raises(UserError, match=r"11\.2% of the images, no better than guessing"):
                choose(found)
