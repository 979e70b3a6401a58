"""Hard MoE: experts of which each image runs one, chosen by clusters of a network's features."""

from pathlib import Path

import pytest
import torch
from expert_models import EXPERTS, Colours, model_of, of_colours
from helpers import counted_macs

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.configured_models import config_of
from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.data import DataInfo
from deepmoe.deploy import ExpertNetworks
from deepmoe.description import description
from deepmoe.errors import UserError
from deepmoe.evaluation import evaluate
from deepmoe.hard_moe import HardMoE, nearest
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training.experts import learn_centroids


def test_an_image_runs_the_expert_of_the_nearest_centroid() -> None:
    features, centroids = torch.randn(40, 7), torch.randn(5, 7)
    expected = []
    for vector in features.tolist():
        distances = [
            sum((a - b) ** 2 for a, b in zip(vector, centre, strict=True))
            for centre in centroids.tolist()
        ]
        expected.append(distances.index(min(distances)))
    assert nearest(features, centroids).tolist() == expected
    assert len(set(expected)) > 3
    # Far from zero too, where products would lose the digits that count; of equals, the first.
    assert nearest(features + 3e3, centroids + 3e3).tolist() == expected
    twice = torch.cat([centroids, centroids])
    assert nearest(features, twice).tolist() == expected


def test_features_are_what_the_classifier_reads() -> None:
    model, x = model_of()
    twin = create_model("resnet20", classes=6, wide=0.25, gates=None).eval()
    weights = twin.network.state_dict() | model.embedding.network.state_dict()
    twin.network.load_state_dict(weights)
    with torch.no_grad():
        logits = twin.network.fc(model.embedding(x))
        torch.testing.assert_close(logits, twin.network(x))
    assert not any("fc" in name for name in model.embedding.state_dict())


@torch.no_grad()
def test_logits_are_those_of_one_expert_in_the_order_of_the_images() -> None:
    model, x = model_of()
    clusters = model.cluster(x).tolist()
    assert clusters[:EXPERTS] == list(range(EXPERTS))
    logits = model(x).logits
    for image, number in enumerate(clusters):
        alone = model.network[number](x[image : image + 1])[0]
        torch.testing.assert_close(logits[image], alone)
        other = model.network[(number + 1) % EXPERTS](x[image : image + 1])[0]
        assert not torch.allclose(logits[image], other, atol=1e-3)


def test_only_the_expert_of_an_image_runs_for_it() -> None:
    model, x = model_of()
    seen: dict[int, int] = {}
    for number, expert in enumerate(model.network):
        expert.conv1.register_forward_hook(
            lambda _, inputs, __, number=number: seen.__setitem__(number, len(inputs[0]))
        )
    model(x)
    assert seen == dict(enumerate(model.cluster(x).bincount().tolist()))
    seen.clear()
    model(x[1:2])
    assert seen == {1: 1}


def test_an_image_teaches_its_own_expert_alone() -> None:
    model, x = model_of()
    model.train()
    clusters = model.cluster(x).tolist()
    for image in (0, 1, 2, 5):
        model.zero_grad()
        model(x).logits[image].square().sum().backward()
        for number, expert in enumerate(model.network):
            felt = [p.grad is not None and bool(p.grad.any()) for p in expert.parameters()]
            assert any(felt) == (number == clusters[image])
    assert all(p.grad is None and not p.requires_grad for p in model.embedding.parameters())


def test_norms_of_the_features_never_follow_what_is_trained() -> None:
    model, x = model_of()
    before = {name: value.clone() for name, value in model.embedding.state_dict().items()}
    features = model.embedding(x)
    model.train()
    model(x)
    assert model.network.training and not any(m.training for m in model.embedding.modules())
    assert torch.equal(model.embedding(x), features)
    for name, value in model.embedding.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_one_image_alone_is_normed_by_what_its_expert_knows() -> None:
    """At the end such an image has one position: there is nothing to take statistics of."""
    model, x = model_of(size=4)
    first, second = x[:1], x[1:2]
    batch = torch.cat([first, second.expand(3, -1, -1, -1) + 0.01 * torch.randn(3, 3, 4, 4)])
    assert model.cluster(batch).tolist() == [0, 1, 1, 1]
    with torch.no_grad():
        alone = model(first).logits[0]
    model.train()
    before = [expert.bn1.running_mean.clone() for expert in model.network]
    logits = model(batch).logits
    torch.testing.assert_close(logits[0], alone)
    moved = [
        not torch.equal(expert.bn1.running_mean, mean)
        for expert, mean in zip(model.network, before, strict=True)
    ]
    assert moved == [False, True, False]
    logits[0].square().sum().backward()
    assert model.network[0].conv1.weight.grad.any()
    assert all(m.training for m in model.network.modules())


def test_clusters_of_features_are_found_and_found_again() -> None:
    images, found = Colours([0.2, 1.5, 4.0]), []
    for _ in range(2):
        torch.manual_seed(0)
        model = of_colours(experts=3)
        told = learn_centroids(model, images, seed=3)
        found.append(model.centroids.clone())
    assert torch.equal(*found)
    assert "60 training images" in told and "33.3%" in told
    clusters = model.cluster(images.x_BCHW)
    for kind in range(3):
        assert len(clusters[images.kinds == kind].unique()) == 1
        members = model.embedding(images.x_BCHW[images.kinds == kind])
        number = int(clusters[images.kinds == kind][0])
        torch.testing.assert_close(model.centroids[number], members.mean(dim=0))
    assert len(clusters.unique()) == 3


def test_an_expert_without_images_gets_one_sentence() -> None:
    with pytest.raises(UserError, match="fall into 2 clusters at most, too few for 4 experts"):
        learn_centroids(of_colours(experts=4), Colours([0.2, 1.5], shades=0.0), seed=0)
    with pytest.raises(UserError, match="8 experts can't share 5 training images"):
        learn_centroids(of_colours(experts=8), Colours([0.2, 1.5], images=5), seed=0)


def test_an_image_costs_its_features_the_distances_and_one_expert() -> None:
    model, x = model_of()
    looking = counted_macs(model.embedding, x[:1])
    expert = counted_macs(model.network[0], x[:1])
    dim = model.network[0].fc.in_features
    assert looking == expert - dim * 6  # less the classifier, which is never asked
    costs = count_costs(model, 16)
    assert (costs.embedding_macs, costs.gate_macs, costs.macs) == (looking, EXPERTS * dim, expert)
    assert count_macs(model, 16) == looking + EXPERTS * dim + expert
    assert dense_macs(model, 16) == expert
    weights = sum(p.numel() for p in model.network[0].parameters())
    assert (costs.params, costs.embedding_params) == (EXPERTS * weights, weights - (dim + 1) * 6)
    result = evaluate(model, [(x, torch.zeros(len(x), dtype=torch.long))])
    assert (result.macs, result.embedding_accuracy) == (count_macs(model, 16), None)
    told = description(model, 16)
    assert (told["experts"], told["macs"]) == (EXPERTS, expert)


@torch.inference_mode()
def test_the_sparse_engine_gives_the_same() -> None:
    model, x = model_of()
    sparse = sparsify(model)
    for images in (x, x[:1], x[3:6]):
        torch.testing.assert_close(
            sparse(images).logits, model(images).logits, rtol=1e-4, atol=1e-5
        )
    assert count_macs(sparse, 16) == count_macs(model, 16)
    for refused in (sparse.train, sparse.state_dict, lambda: sparsify(sparse), sparse.double):
        with pytest.raises(UserError, match="sparse"):
            refused()


def test_a_plain_module_of_it_can_be_exported() -> None:
    model, images = of_colours(experts=3).eval(), Colours([0.2, 1.5, 4.0])
    learn_centroids(model, images, seed=0)
    for parameter in model.network.parameters():
        parameter.data += torch.randn_like(parameter)
    plain, x = ExpertNetworks(model), images.x_BCHW
    exported = torch.export.export(plain, (x[:1],)).module()
    assert sorted(model.cluster(x[:3]).tolist()) == [0, 1, 2]
    for image in range(3):
        one = x[image : image + 1]
        torch.testing.assert_close(exported(one), model(one).logits)
    with pytest.raises(UserError, match="one image at a time, not 2"):
        plain(x[:2])
    with pytest.raises(UserError, match="ExpertNetworks can be exported"):
        torch.export.export(model, (x,))


@torch.no_grad()
@pytest.mark.parametrize("double", [False, True])
def test_a_file_gives_back_the_same_model(tmp_path: Path, double: bool) -> None:
    model, x = model_of()
    model, x = (model.double(), x.double()) if double else (model, x)
    info = DataInfo(tuple("abcdef"), (16, 16), (0.5,) * 3, (0.5,) * 3)
    save_checkpoint(tmp_path / "a", model, config_of(model), info, TrainState())
    loaded = load_checkpoint(tmp_path / "a").model
    assert isinstance(loaded, HardMoE)
    assert torch.equal(loaded.centroids, model.centroids)
    torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=1e-6, atol=1e-7)
    assert not any(p.requires_grad for p in loaded.embedding.parameters())
    model.save_pretrained(tmp_path / "hub")
    again = HardMoE.from_pretrained(tmp_path / "hub")
    torch.testing.assert_close(again(x).logits, model(x).logits, rtol=1e-6, atol=1e-7)
