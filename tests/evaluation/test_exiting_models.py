"""Models whose embedding answers some images do what their answers say."""

import pytest
import torch
from made_up_answers import answers
from torch import Tensor, nn
from unsure_models import unsure

from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.errors import UserError
from deepmoe.evaluation import (
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


def batches(model: DeepMoE) -> list[tuple[Tensor, Tensor]]:
    """Images, most of them labelled as the model says."""
    x = torch.randn(40, 3, 16, 16)
    with torch.no_grad():
        found = model(model.as_input(x))
    early = found.embedding_logits.argmax(dim=1)
    labels = torch.where(torch.rand(40) < 0.5, early, found.logits.argmax(dim=1))
    return list(zip(x.split(25), labels.split(25), strict=True))


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
