import numpy as np
import pytest
import torch

from deepmoe.config import EmbeddingConfig, HeadsConfig
from deepmoe.data.coarse_groups import CIFAR100, coarse_groups
from deepmoe.errors import UserError
from deepmoe.evaluation.shuffling import shuffle_gates
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model

NAMES = ("cat", "dog", "rose", "tulip")
GROUPS = ("animal", "animal", "flower", "flower")


@pytest.fixture(scope="module")
def model() -> DeepMoE:
    torch.manual_seed(1)
    return create_model(
        "resnet20",
        classes=4,
        widths=[4] * 9,
        embedding=EmbeddingConfig(widths=(4, 8)),
        heads=HeadsConfig(init="normal(0, 1)"),
    ).eval()


@pytest.fixture(scope="module")
def batches(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images whose labels are the model's own answers, but for some that are wrong."""
    torch.manual_seed(2)
    torch.nn.init.normal_(model.embedding.project.weight, std=5.0)
    images = torch.randn(30, 3, 16, 16)
    labels = torch.arange(30) % 4
    with torch.no_grad():
        labels[::3] = model(images).logits.argmax(dim=1)[::3]
    return [(images[:20], labels[:20]), (images[20:], labels[20:])]


@torch.no_grad()
def plainly(model: DeepMoE, batches) -> dict[tuple[int, int], list[int]]:
    """Answers for each image under the gates of every image of another class, one at a time."""
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    gates = [model.route(image[None])[0] for image in images]
    found: dict[tuple[int, int], list[int]] = {}
    for image, label in zip(images, labels.tolist(), strict=True):
        for given, other in zip(gates, labels.tolist(), strict=True):
            if other != label:
                answer = model.gating(model.network, image[None], given).argmax()
                found.setdefault((label, other), []).append(int(answer))
    return found


def test_many_draws_come_to_what_all_pairs_of_images_give(model, batches) -> None:
    shuffled = shuffle_gates(model, batches, NAMES, groups=GROUPS, draws=300)
    reference = plainly(model, batches)
    seen = {pair: [np.mean(np.equal(a, c)) for c in pair] for pair, a in reference.items()}
    assert any(0 < right < 1 for right, _ in seen.values())  # gates do matter here
    assert any(0.2 < followed != right for right, followed in seen.values())
    for pair, (right, followed) in seen.items():
        assert shuffled.accuracy[pair] == pytest.approx(right, abs=0.12)
        share = shuffled.followed[pair] / shuffled.drawn[pair]
        assert share == pytest.approx(followed, abs=0.12)
    assert np.isnan(np.diag(shuffled.accuracy)).all()
    # 300 draws are 100 of each other class.
    assert shuffled.drawn[0].tolist() == [0, *[100 * shuffled.images[0]] * 3]
    cat = shuffled.of_class("cat")
    assert cat.group == "animal"
    assert cat.in_group == shuffled.accuracy[0, 1]
    assert cat.out_of_group == pytest.approx(shuffled.accuracy[0, 2:].mean())
    assert cat.followed == pytest.approx((shuffled.followed[0, 1:] / shuffled.drawn[0, 1:]).mean())
    labels = torch.cat([labels for _, labels in batches])
    with torch.no_grad():
        answers = torch.cat([model(x).logits.argmax(dim=1) for x, _ in batches])
    assert cat.own == pytest.approx((answers == labels)[labels == 0].double().mean().item())


def test_draws_repeat_themselves_and_can_be_of_one_class(model, batches) -> None:
    one, again = (shuffle_gates(model, batches, NAMES, draws=5, seed=3) for _ in range(2))
    assert one.as_dict() == again.as_dict()
    assert one.total.in_group is None and one.as_dict()["pairs"][0][0] is None
    dog = shuffle_gates(model, batches, NAMES, draws=6, only="dog", most=2)
    assert dog.images.tolist() == [0, 2, 0, 0]
    assert dog.drawn.sum(axis=1).tolist() == [0, 12, 0, 0]
    assert dog.of_class("cat").own is None
    with pytest.raises(UserError, match="no class named emu"):
        shuffle_gates(model, batches, NAMES, only="emu")
    with pytest.raises(UserError, match="none of these 30 images is of the class owl: take more"):
        shuffle_gates(model, batches, (*NAMES, "owl"), only="owl")
    with pytest.raises(UserError, match="draws each are too many"):
        shuffle_gates(model, batches, NAMES, draws=10**9)


def test_what_has_no_gates_or_classes_is_refused(model, batches) -> None:
    dense = create_model("resnet20", classes=4, widths=[4] * 9, gates=None)
    with pytest.raises(UserError, match="without gates"):
        shuffle_gates(dense, batches, NAMES)
    with pytest.raises(UserError, match="one class"):
        shuffle_gates(model, [(batches[0][0], torch.zeros(20, dtype=torch.long))], NAMES)
    for names, options, words in (
        (NAMES[:2], {}, "2 names of classes"),
        (NAMES, {"groups": ["a"]}, "and 1 groups for them"),
        (NAMES, {"seed": -1}, "from 0 on, not -1"),
    ):
        with pytest.raises(UserError, match=words):
            shuffle_gates(model, batches, names, **options)
    with pytest.raises(UserError, match="have no class"):
        shuffle_gates(model, [(batches[0][0], torch.zeros(20, 16, 16, dtype=torch.long))], NAMES)


def test_only_cifar100_has_coarse_groups() -> None:
    names = sorted(name for members in CIFAR100.values() for name in members.split())
    groups = coarse_groups(names)
    assert groups[names.index("dolphin")] == "aquatic mammals"
    assert [groups.count(group) for group in CIFAR100] == [5] * 20
    assert coarse_groups(names[:-1]) is None and coarse_groups(NAMES) is None
