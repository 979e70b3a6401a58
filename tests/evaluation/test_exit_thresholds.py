"""When the embedding answers itself: what a threshold does, how one is found and certified."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import write_python
from click.testing import CliRunner, Result
from helpers import tiny_config
from pair_files import open_pairs, write_pairs
from PIL import Image
from scipy.stats import binom
from torch import Tensor, nn

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import EmbeddingConfig, apply_overrides
from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.errors import UserError
from deepmoe.evaluation import (
    Answers,
    ExitFigures,
    collect_answers,
    evaluate,
    exit_certified,
    exit_for_loss,
    exit_for_macs,
    set_exits,
)
from deepmoe.evaluation.exit_answers import VOTES, best_vote
from deepmoe.model import DeepMoE, confidence
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training import fit


def answers(
    sure: Tensor | list[float],
    early: Tensor | list[bool],
    right: Tensor | list[bool],
    macs: Tensor | list[int] | None = None,
    joint: list[bool] | None = None,
    **options: int,
) -> Answers:
    """Made-up answers; with so many classes that an embedding is soon better than chance."""
    sure, early, right = (torch.as_tensor(values) for values in (sure, early, right))
    macs = torch.full((len(right),), 100) if macs is None else torch.as_tensor(macs)
    costs = {"embedding_macs": 10, "dense_macs": 90, "classes": 10_000, **options}
    nothing = torch.zeros(len(right))
    return Answers(
        confidence=sure,
        early_right=early,
        right=right,
        joint_right=right if joint is None else torch.as_tensor(joint),
        early_loss=nothing,
        loss=nothing,
        joint_loss=nothing,
        vote=0.0 if joint is None else 0.5,
        active=nothing,
        macs=macs,
        macs_without=macs - 10,
        **costs,
    )


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


def test_the_vote_is_the_one_that_predicts_best() -> None:
    torch.manual_seed(0)
    model = unsure(None)
    x = torch.randn(60, 3, 16, 16)
    with torch.no_grad():
        plain = model(x)
    for answer, vote in ((plain.logits, 0.0), (plain.embedding_logits, max(VOTES))):
        assert collect_answers(model, [(x, answer.argmax(dim=1))], VOTES).vote == vote


def test_a_vote_that_makes_answers_worse_is_left_out() -> None:
    losses_VT = torch.tensor([[3.0, 2.0], [1.0, 9.0], [1.5, 1.5]])
    assert best_vote(losses_VT, torch.tensor([50, 50, 51]), torch.tensor(50)) == 1
    assert best_vote(losses_VT, torch.tensor([50, 49, 51]), torch.tensor(50)) == 2
    assert best_vote(losses_VT[1:2], torch.tensor([40]), torch.tensor(50)) == 0  # the only one


def test_exits_that_are_set_do_not_depend_on_the_mode_they_were_found_in() -> None:
    model = unsure(None)
    images = batches(model)
    with torch.inference_mode():
        set_exits(model, images, loss=20)
    assert not model.exit_at.is_inference()
    for wrong in (images[0][1] + 1000, torch.full_like(images[0][1], -100)):
        with pytest.raises(UserError, match="labels are from"):
            set_exits(model, [(images[0][0], wrong)], loss=20)
    with pytest.raises(UserError, match="no sparse model"):
        set_exits(sparsify(model), images, loss=20)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_any_whole_numbers(dtype: torch.dtype) -> None:
    model = unsure(None)
    images = batches(model)
    others = [(x, labels.to(dtype)) for x, labels in images]
    assert set_exits(model, others, loss=20) == set_exits(model, images, loss=20)
    assert evaluate(model, others) == evaluate(model, images)
    with pytest.raises(UserError, match="a deepmoe model is needed, not a Linear"):
        set_exits(nn.Linear(2, 2), images, loss=20)


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


def unsure(gates: str | None, dtype: torch.dtype = torch.float32) -> DeepMoE:
    """A model whose embedding is sure of some images, and not of others."""
    torch.manual_seed(0)
    model = create_model(
        "resnet20",
        classes=10,
        widths=[4] * 9,
        gates=gates,
        exits=True,
        embedding=EmbeddingConfig(widths=(4, 8)),
    ).eval()
    nn.init.normal_(model.embedding.project.weight, std=5.0)
    if model.heads is not None:
        nn.init.normal_(model.heads.weight)
    return model.to(dtype)


def batches(model: DeepMoE) -> list[tuple[Tensor, Tensor]]:
    """Images, most of them labelled as the model says."""
    x = torch.randn(40, 3, 16, 16)
    with torch.no_grad():
        found = model(model.as_input(x))
    early = found.embedding_logits.argmax(dim=1)
    labels = torch.where(torch.rand(40) < 0.5, early, found.logits.argmax(dim=1))
    return list(zip(x.split(25), labels.split(25), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gates", [None, "inner"])
def test_a_model_does_what_its_answers_say(gates: str | None, dtype: torch.dtype) -> None:
    model = unsure(gates, dtype)
    images = batches(model)
    found = collect_answers(model, images, VOTES)
    alone = collect_answers(model, images)
    costs = count_costs(model, 16)
    without = evaluate(model, images)
    share = 0.6 * without.macs_share
    figures = set_exits(model, images, macs=share)
    assert figures == exit_for_macs(found, share)
    assert figures.macs / dense_macs(model, 16) <= share
    # An embedding that neither answers nor makes gates need not look.
    looked = costs.embedding_macs if gates is None else 0
    assert figures.macs_without == pytest.approx(without.macs - looked)
    assert figures.accuracy_without == without.accuracy
    result = evaluate(model, images)
    assert 0.1 < figures.exited < 0.9
    assert (result.exited, result.accuracy) == (figures.exited, figures.accuracy)
    assert result.macs == pytest.approx(figures.macs)
    assert result.dense_macs == figures.dense_macs == dense_macs(model, 16)
    again = collect_answers(model, images)  # exits that are set already change nothing
    assert torch.equal(again.right, found.right) and torch.equal(again.macs, found.macs)
    assert again.vote == pytest.approx(found.vote) and torch.equal(
        again.joint_right, found.joint_right
    )
    assert set_exits(model, images, loss=20) == exit_for_loss(found, 20)
    # What is certified is the network's own answer.
    assert set_exits(model, images, loss=40, guarantee=0.9) == exit_certified(alone, 40, 0.9)
    assert float(model.exit_at) == exit_certified(alone, 40, 0.9).threshold
    assert model.exit_vote is None


@torch.no_grad()
@pytest.mark.parametrize("gates", [None, "inner"])
def test_images_that_exit_carry_the_embeddings_logits(gates: str | None) -> None:
    model, x = unsure(gates), torch.randn(9, 3, 16, 16)
    plain = model(x)
    assert plain.exited is None
    sure = confidence(plain.embedding_logits)
    model.exit_at = sure.median()  # one image is as sure as that
    output = model(x)
    assert torch.equal(output.exited, sure >= sure.median()) and output.exited.sum() == 5
    assert torch.equal(output.logits[output.exited], plain.embedding_logits[output.exited])
    assert torch.equal(output.logits[~output.exited], plain.logits[~output.exited])
    model.exit_vote = torch.tensor(0.25)  # of what it says of images that go on
    voted = model(x)
    both = 0.75 * plain.logits + 0.25 * plain.embedding_logits
    torch.testing.assert_close(voted.logits[~output.exited], both[~output.exited])
    assert torch.equal(voted.logits[output.exited], output.logits[output.exited])

    whole, looking = count_macs(model, 16, plain.gates), model.embedding.macs(16, 16)
    macs = count_macs(model, 16, output.gates, output.exited)
    assert torch.equal(macs, torch.where(output.exited, looking, whole))
    labels = voted.logits.argmax(dim=1)
    result = evaluate(model, [(x[:4], labels[:4]), (x[4:], labels[4:])])
    assert (result.exited, result.accuracy) == (5 / 9, 1)
    assert result.macs == pytest.approx(macs.double().mean().item())
    early = plain.embedding_logits.argmax(dim=1) == labels
    assert result.embedding_accuracy == pytest.approx(early.double().mean().item())
    if gates is None:
        assert result.active == 4 / 9

    model.train()
    assert model(x).exited is None


def test_exits_that_cost_more_than_they_save_are_refused(monkeypatch) -> None:
    """An embedding that makes no gates and answers few images is looked at in vain."""
    model = unsure(None)
    for answered, pays in ((0.05, False), (0.2, True)):
        sure = torch.linspace(1, 0, 100)
        found = answers(sure, sure > 1 - answered, [True] * 100)
        monkeypatch.setattr("deepmoe.evaluation.exits.collect_answers", lambda *_, f=found: f)
        assert (found.at(1 - answered).macs < 90) == pays
        if pays:
            assert set_exits(model, [], loss=0).exited == pytest.approx(answered)
            assert model.exit_at is not None
        else:
            with pytest.raises(UserError, match="exits do not pay"):
                set_exits(model, [], loss=0)
            assert model.exit_at is None


def test_exits_need_an_embedding() -> None:
    dense = create_model("resnet20", classes=10, widths=[4] * 9, gates=None)
    with pytest.raises(ValueError, match="need an embedding"):
        DeepMoE(None, None, dense.network, dense.gating, exit_at=torch.tensor(0.5))
    with pytest.raises(UserError, match=r"no embedding .* model\.exits=true"):
        collect_answers(dense, [])
    pixels = [(torch.randn(1, 3, 16, 16), torch.zeros(1, 16, 16, dtype=torch.long))]
    with pytest.raises(UserError, match="an embedding answers for a whole image"):
        collect_answers(unsure(None), pixels)
    broken = unsure(None)
    broken.embedding.project.weight.data.fill_(3e38)
    broken.embedding.convs[-1].bn.weight.data.fill_(1e6)
    with pytest.raises(UserError, match="not finite"):
        collect_answers(broken, [(torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.long))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_weights_in_half_precision_leave_the_threshold_exact(dtype: torch.dtype) -> None:
    """One of 8 bits would let many more or fewer images exit, where many are about as sure."""
    model = unsure(None).eval()
    model.exit_at, model.exit_vote = torch.tensor(0.9871), torch.tensor(0.15)
    exact = (float(model.exit_at), float(model.exit_vote))
    for way in (model.to(dtype), sparsify(model), model.with_gates(), model.float()):
        assert (float(way.exit_at), float(way.exit_vote)) == exact
    model.to(dtype)
    sure = torch.tensor([0.98705, 0.98715]).double()  # on both sides of it
    logits = torch.stack([sure, 1 - sure], dim=1).log()
    assert model.exits(logits.float()).tolist() == [False, True]
    assert model.double().exit_at.dtype == torch.float64


@torch.no_grad()
def test_exits_of_a_model_in_half_precision_are_as_found() -> None:
    model = unsure(None).bfloat16().eval()
    x = torch.randn(400, 3, 16, 16).bfloat16()
    labels = model(x).embedding_logits.argmax(dim=1)
    figures = set_exits(model, [(x, labels)], macs=0.5)
    assert float(model.exit_at) == figures.threshold
    assert float(model(x).exited.double().mean()) == figures.exited


HELD_OUT = ("data.holdout=300", "train.epochs=2", "train.finetune_epochs=0", "train.batch_size=32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("model.gates=none", "model.exits=true", *HELD_OUT)
    return fit(config, tmp_path_factory.mktemp("trained"), quiet=True).checkpoint


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def json_of(*arguments: object) -> dict:
    done = deepmoe(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "asked", [("--macs", 0.6), ("--loss", 3), ("--loss", 5, "--guarantee", 0.9)], ids=str
)
def test_the_verb_writes_a_checkpoint_that_others_read(
    asked: tuple, trained: Path, tmp_path: Path
) -> None:
    out, image = tmp_path / "exits.safetensors", tmp_path / "grey.png"
    figures = json_of("exits", trained, *asked, "--out", out)
    assert (figures["images"], figures["fitted_on"]) == (300, "holdout")
    assert 0.05 < figures["exited"] <= 1
    assert figures["guarantee"] == (0.9 if "--guarantee" in asked else None)
    if "--macs" in asked:
        assert figures["macs_share"] <= 0.6 < figures["macs_share_without"] == 1
    else:
        assert figures["loss"] <= asked[1] / 100 + 1e-9
    told = json_of("eval", out)
    for key in ("exited", "accuracy", "macs", "macs_share", "images"):
        assert told[key] == pytest.approx(figures[key])
    assert json_of("eval", out, "--sparse")["exited"] == pytest.approx(figures["exited"])
    on_test = json_of("eval", out, "--set", "data.holdout=0")
    assert on_test["evaluated_on"] == "test" and on_test["images"] == 360
    assert 0 < on_test["exited"] <= 1
    Image.new("L", (8, 8), 200).save(image)
    (answer,) = json_of("predict", out, image)
    loaded = load_checkpoint(out)
    assert loaded.config.model.exits and float(loaded.model.exit_at) == figures["threshold"]
    costs = count_costs(loaded.model, 8)
    early = answer["answered_by"] == "embedding"
    assert answer["macs"] == costs.embedding_macs + (0 if early else costs.macs)


def test_the_verb_tells_what_was_found(trained: Path, tmp_path: Path) -> None:
    plain = deepmoe("exits", trained, "--macs", 0.6, "--out", tmp_path / "a")
    assert plain.exit_code == 0, plain.output
    assert "fitted on 300 images (holdout)" in plain.output and "certified" not in plain.output
    assert "(one standard error); --guarantee bounds the loss" in plain.output
    sure = deepmoe("exits", trained, "--loss", 5, "--guarantee", 0.9, "--out", tmp_path / "b")
    assert "with probability 0.9, accuracy falls by at most 5 points" in sure.output


def test_a_gated_model_in_double_precision_gets_exits(tmp_path: Path) -> None:
    config = tiny_config(*HELD_OUT, "train.precision=64-true")
    run = fit(config, tmp_path / "run", quiet=True)
    whole = run.evaluation.macs_share
    out = tmp_path / "exits.safetensors"
    figures = json_of("exits", run.checkpoint, "--macs", 0.7 * whole, "--out", out)
    assert figures["macs_share"] <= 0.7 * whole < figures["macs_share_without"]
    told = json_of("eval", out)
    for key in ("exited", "accuracy", "macs"):
        assert told[key] == pytest.approx(figures[key])
    assert load_checkpoint(out).model.exit_at.dtype == torch.float64


def assert_refused(result: Result, *words: str) -> None:
    """One clear sentence on stderr, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a loss, such as 0.5, or macs"),
        (["--loss", 1, "--macs", 0.5], "give a loss, such as 0.5, or macs"),
        (["--macs", 0.5, "--guarantee", 0.95], "give a loss with it"),
        (["--macs", 0.001], "can't bring the cost to 0.001"),
        (["--loss", 0.1, "--guarantee", 0.99], "are needed"),
        (["--loss", 1e-6, "--guarantee", 0.9], "are needed"),
        (["--loss", 1e-300, "--guarantee", 0.9], "(1e-06 or more), not at 1e-300"),
        (["--loss", 1, "--set", "train.lr=1"], "--set can change only data"),
        (["--loss", 1, "--set", "data.holdout=200"], "data.holdout=300"),
        # The test set is none to choose a threshold on, wherever it lies.
        (["--loss", 1, "--set", "data.holdout=0"], "not on the test set"),
        (["--loss", 1, "--set", "data.holdout=0", "--set", "data.root=x"], "not on the test"),
        (["--loss", 1, "--set", "data.holdout=0", "--set", "data.name=digits"], "not on the test"),
    ],
    ids=str,
)
def test_mistakes_get_one_sentence(
    arguments: list, words: str, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    assert_refused(deepmoe("exits", trained, *arguments, "--out", out), words)
    assert not out.exists()


def test_the_test_set_is_none_to_fit_on_for_a_model_of_unknown_data(
    trained: Path, tmp_path: Path
) -> None:
    """Such as one that was saved for the hub."""
    path = as_checkpoint(trained, tmp_path / "given", "data.name=given", "data.holdout=0")
    asked = ("exits", path, "--macs", 0.6, "--set", "data.name=digits", "--set", "data.size=8")
    assert_refused(deepmoe(*asked, "--out", tmp_path / "out"), "not on the test set")
    held_out = deepmoe(*asked, "--set", "data.holdout=300", "--out", tmp_path / "out")
    assert held_out.exit_code == 0, held_out.output


def test_the_test_set_of_a_folder_is_none_to_fit_on_however_it_is_named(
    trained: Path, tmp_path: Path, monkeypatch
) -> None:
    for part, word in itertools.product(("mine", "other"), ("train", "val")):
        for label in range(10):
            folder = tmp_path / part / word / str(label)
            folder.mkdir(parents=True)
            for image in range(2):
                Image.new("RGB", (8, 8), (20 * label, 5 * image, 0)).save(folder / f"{image}.png")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    folder = ("data.name=image-folder", "data.root=mine", "data.size=8", "data.workers=0")
    path = as_checkpoint(trained, tmp_path / "folder.safetensors", *folder, "data.holdout=10")
    asked = ("exits", path, "--macs", 0.5, "--out", "out.safetensors", "--set", "data.holdout=0")
    for same in ("mine", "./mine/", tmp_path / "mine", "link"):
        assert_refused(deepmoe(*asked, "--set", f"data.root={same}"), "not on the test set")
    # Another one may be named. (Nothing was learnt of these images.)
    refused = deepmoe(*asked, "--set", "data.root=other")
    assert_refused(refused, "no better than guessing")


def as_checkpoint(trained: Path, path: Path, *settings: str) -> Path:
    """The trained checkpoint, with other settings written into it."""
    loaded = load_checkpoint(trained)
    config = apply_overrides(loaded.config, settings)
    save_checkpoint(path, loaded.model, config, loaded.info, loaded.state)
    return path


def without_embedding(trained: Path, path: Path) -> Path:
    loaded = load_checkpoint(trained)
    dense = DeepMoE(None, None, loaded.model.network, loaded.model.gating)
    config = apply_overrides(loaded.config, ["model.exits=false"])
    save_checkpoint(path, dense, config, loaded.info, loaded.state)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, p: as_checkpoint(t, p, "data.holdout=0"), "train it with data.holdout"),
        (lambda t, p: as_checkpoint(t, p, "loss.embedding=0"), "never trained to classify"),
        (
            lambda t, p: as_checkpoint(t, p, "loss.embedding=[[0, 0.0], [2, 0.0]]"),
            "never trained to classify",
        ),
        (without_embedding, "no embedding that could answer"),
    ],
    ids=["no holdout", "mu 0", "a schedule of 0", "dense"],
)
def test_models_without_an_answer_get_one_sentence(
    change: Callable[[Path, Path], Path], words: str, trained: Path, tmp_path: Path
) -> None:
    path, out = change(trained, tmp_path / "changed.safetensors"), tmp_path / "out.safetensors"
    assert_refused(deepmoe("exits", path, "--loss", 1, "--out", out), words)
    assert not out.exists()


def test_an_embedding_may_have_been_taught_for_a_while(trained: Path, tmp_path: Path) -> None:
    path = as_checkpoint(trained, tmp_path / "a", "loss.embedding=[[0, 1.0], [2, 0.0]]")
    done = deepmoe("exits", path, "--loss", 3, "--out", tmp_path / "b")
    assert done.exit_code == 0, done.output


def test_other_data_and_tasks_and_files_in_the_way_get_one_sentence(
    trained: Path, tmp_path: Path
) -> None:
    assert_refused(deepmoe("exits", trained, "--loss", 1, "--out", trained), "already exists")
    write_python(tmp_path, "cifar100")
    other = [f"data.root={tmp_path}", "data.name=cifar100", "data.size=32", "data.holdout=0"]
    settings = [arg for item in other for arg in ("--set", item)]
    out = tmp_path / "out.safetensors"
    refused = deepmoe("exits", trained, "--loss", 1, "--out", out, *settings)
    assert_refused(refused, "knows 10 classes", "has 100")

    data = open_pairs(write_pairs(tmp_path / "pairs"))
    config = tiny_config(
        "model.name=drn_a_50",
        "model.widths=[4, 4, 4, 4]",
        "data.name=segmentation-pairs",
        f"data.root={tmp_path / 'pairs'}",
        "data.workers=0",
    )
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, widths=None, wide=0.05)
    )
    model = create_model(
        "drn_a_50", classes=data.info.classes, wide=0.05, embedding=config.embedding
    )
    path = tmp_path / "segments.safetensors"
    save_checkpoint(path, model, config, data.info, TrainState())
    refused = deepmoe("exits", path, "--loss", 1, "--out", out)
    assert_refused(refused, "segmentation has no exits")
    assert not out.exists()
