"""Hard MoE: experts of which each image runs one, chosen by clusters of a network's features."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from helpers import counted_macs, randomise_statistics, tiny_config
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepmoe.bench.subjects import trained_subject
from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import GIVEN, ModelConfig, RunConfig, config_from_dict, load_config
from deepmoe.configured_models import config_of
from deepmoe.costs import count_costs, count_macs, dense_macs
from deepmoe.data import DataInfo, open_data
from deepmoe.deploy import ExpertNetworks
from deepmoe.description import description
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.evaluation import cost_curve, cut_to, evaluate, set_exits
from deepmoe.evaluation.gate_record import collect_gates
from deepmoe.graph import evaluation_mode
from deepmoe.hard_moe import HardMoE, nearest
from deepmoe.losses import DeepMoELoss
from deepmoe.pruning import prune
from deepmoe.registry import create_model, from_network
from deepmoe.sparse import sparsify
from deepmoe.training import FitResult, fit
from deepmoe.training.experts import learn_centroids
from deepmoe.training.step import EagerStep, Objective
from deepmoe.training.teachers import Teachers
from deepmoe.training.trainer import Trainer
from deepmoe.widening import widen

EXPERTS = 3


def model_of(size: int = 16, images: int = 8) -> tuple[HardMoE, Tensor]:
    """A made-up model whose experts differ, and images of which each expert runs some."""
    model = create_model("resnet20", classes=6, wide=0.25, gates=None, experts=EXPERTS).eval()
    assert isinstance(model, HardMoE)
    randomise_statistics(model)
    for parameter in model.network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    x = torch.randn(images, 3, size, size)
    with torch.no_grad():
        model.centroids.copy_(model.embedding(x[:EXPERTS]))
    return model, x


class Colours:
    """A loader of images of one colour each, some shades around each of a few."""

    def __init__(self, colours: list[float], shades: float = 0.05, images: int = 60) -> None:
        generator = torch.Generator().manual_seed(1)
        self.kinds = torch.arange(images) % len(colours)
        grey = torch.tensor(colours)[self.kinds] + shades * torch.rand(images, generator=generator)
        self.x_BCHW = grey.view(-1, 1, 1, 1).expand(-1, 3, 8, 8)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x_BCHW.split(25), self.kinds.split(25), strict=True)


def of_colours(experts: int) -> HardMoE:
    """A model whose features grow with the brightness of an image."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    nn.init.constant_(network[0].weight, 1.0)
    source = ModelConfig(GIVEN, gates="none", experts=experts)
    model = from_network(network, source, None, (8, 8), None, None)
    assert isinstance(model, HardMoE)
    return model


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


# Runs, from a start that is pruned.


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    folder = tmp_path_factory.mktemp("start")
    plain = ("model.gates=none", "train.epochs=1", "train.finetune_epochs=0")
    whole = fit(tiny_config(*plain), folder / "whole", quiet=True)
    pruned = ("train.prune=0.5", "train.prune_by=strength", f"train.start={whole.checkpoint}")
    return fit(tiny_config(*plain, *pruned), folder / "pruned", quiet=True)


def mixture(start: FitResult, *settings: str) -> RunConfig:
    experts = ("model.gates=none", f"model.experts={EXPERTS}", f"train.start={start.checkpoint}")
    return tiny_config(*experts, "train.epochs=2", "train.finetune_epochs=0", *settings)


@pytest.fixture(scope="module")
def whole_run(start: FitResult, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fit(mixture(start), tmp_path_factory.mktemp("mixture"), quiet=True)


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_a_run_trains_experts_and_leaves_the_features_alone(
    start: FitResult, whole_run: FitResult
) -> None:
    model = whole_run.model
    assert isinstance(model, HardMoE) and model.source.kept == start.model.source.kept is not None
    trained = start.model.network.state_dict()
    for name, value in model.embedding.network.state_dict().items():
        assert torch.equal(value, trained[name]), name
    experts = [expert.fc.weight for expert in model.network]
    for number, weight in enumerate(experts):
        assert not torch.equal(weight, trained["fc.weight"])
        assert not any(torch.equal(weight, other) for other in experts[:number])
    # Half of the dense MACs for the features, and as much for one expert.
    result = whole_run.evaluation
    assert result.dense_macs == start.evaluation.dense_macs
    twice = 2 * start.evaluation.macs
    assert result.macs == twice - (10 - EXPERTS) * model.embedding.dim
    momentum = load_checkpoint(whole_run.checkpoint).optimizer_state
    assert momentum and all(name.startswith("network.") for name in momentum)


def test_clusters_are_learnt_before_the_first_step(start: FitResult, whole_run: FitResult) -> None:
    """And stay: they are those of the start's features, of augmented training images."""
    config = mixture(start)
    data = open_data(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    twin = load_checkpoint(whole_run.checkpoint).model
    assert isinstance(twin, HardMoE)
    twin.centroids.zero_()
    learn_centroids(twin, data.train, config.train.seed)
    assert whole_run.model.has_centroids
    torch.testing.assert_close(twin.centroids, whole_run.model.centroids)


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    start: FitResult, whole_run: FitResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = whole_run.checkpoint.with_name("epoch-0001.safetensors")
    (tmp_path / "epoch").mkdir()
    shutil.copy(first, tmp_path / "epoch" / "last.safetensors")
    resumed = fit(mixture(start), tmp_path / "epoch", resume=True, quiet=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert resumed.evaluation == whole_run.evaluation
    # Within an epoch, too.
    batches, run = iter([None, None, "stopped"]), tmp_path / "batch"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_wish", property(lambda _: next(batches, "stopped")))
        with pytest.raises(TrainingInterrupted, match="after batch 3 of epoch 1"):
            fit(mixture(start), run, quiet=True)
    resumed = fit(mixture(start), run, resume=True, quiet=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)


def test_the_configuration_that_a_run_leaves_names_all(whole_run: FitResult) -> None:
    left = load_config(whole_run.checkpoint.with_name("config.toml"))
    assert (left.model.experts, left.model.kept) == (EXPERTS, whole_run.model.source.kept)
    assert left.dense.model.experts is None


def test_a_run_may_go_on_from_such_a_model(whole_run: FitResult, tmp_path: Path) -> None:
    still = ("train.epochs=1", "train.lr=1e-12", "train.weight_decay=0")
    run = fit(mixture(whole_run, *still), tmp_path, quiet=True)
    assert torch.equal(run.model.centroids, whole_run.model.centroids)
    expected = dict(whole_run.model.named_parameters())
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name])


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("sparse", [(), ("--sparse",)])
def test_eval_and_predict_take_it(
    whole_run: FitResult, tmp_path: Path, sparse: tuple[str, ...]
) -> None:
    result = deepmoe("eval", whole_run.checkpoint, "--json", *sparse)
    assert result.exit_code == 0, result.output
    values, expected = json.loads(result.stdout), whole_run.evaluation
    assert (values["accuracy"], values["macs"]) == (expected.accuracy, expected.macs)
    assert values["macs_share"] == expected.macs / expected.dense_macs
    Image.new("L", (12, 9), 200).save(tmp_path / "grey.png")
    result = deepmoe("predict", whole_run.checkpoint, tmp_path / "grey.png", "--json", *sparse)
    assert result.exit_code == 0, result.output
    (answer,) = json.loads(result.stdout)
    assert answer["macs"] == expected.macs and answer["label"] in "0123456789"


@pytest.mark.parametrize("verb", [("curve",), ("cut", "--macs", "0.5"), ("exits", "--macs", "0.5")])
def test_verbs_that_need_gates_say_so(
    verb: tuple[str, ...], whole_run: FitResult, tmp_path: Path
) -> None:
    out = () if verb == ("curve",) else ("--out", tmp_path / "small")
    result = deepmoe(verb[0], whole_run.checkpoint, *verb[1:], *out)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "made of experts" in result.output and "Traceback" not in result.output


def test_there_is_nothing_to_skip_that_could_be_timed(whole_run: FitResult) -> None:
    with pytest.raises(UserError, match="no channels to skip"):
        trained_subject(whole_run.checkpoint, batch=1, codes=None, device="cpu")


def test_functions_that_need_gates_say_so() -> None:
    model, x = model_of()
    batches: Any = [(x, torch.zeros(len(x), dtype=torch.long))]
    for refused in (
        lambda: cost_curve(model, batches),
        lambda: cut_to(model, 16, 0.5, batches, batches),
        lambda: set_exits(model, batches, macs=0.5),
        lambda: prune(model, 16, 0.5, batches),
        lambda: widen(model, 2),
    ):
        with pytest.raises(UserError, match="made of experts"):
            refused()
    record = collect_gates(model, batches, tuple("abcdef"))
    assert record.gates == () and record.experts.tolist() == model.cluster(x).tolist()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model.experts=1",), "from 2 to 64, not be 1"),
        (("model.experts=1000000000",), "from 2 to 64"),
        (("model.gates=inner",), "neither gates nor exits"),
        (("model.exits=true",), "neither gates nor exits"),
        (("train.prune=0.5", "train.start=a"), "that is already trained"),
        (("embedding.form=network", "embedding.prune=0.5"), "that is already trained"),
        (("train.target_macs=0.5",), "experts have none"),
        (("train.codes=4", "train.finetune_epochs=1"), "needs a gated model"),
        (("train.compile=on",), "can't be compiled"),
    ],
)
def test_settings_that_do_not_go_together_get_one_sentence(
    settings: tuple[str, ...], words: str
) -> None:
    basic = ("model.gates=none", "model.experts=4", "train.start=a", "train.finetune_epochs=0")
    with pytest.raises(UserError, match=words):
        tiny_config(*basic, *settings)


def test_runs_that_can_not_be_get_one_sentence(start: FitResult, tmp_path: Path) -> None:
    gated = fit(
        tiny_config("train.epochs=1", "train.finetune_epochs=0"), tmp_path / "gated", quiet=True
    )
    for settings, options, words in (
        ((), {"devices": 2}, "on one device, not on 2"),
        (("train.start=missing",), {}, "no checkpoint at missing"),
        ((f"train.start={gated.checkpoint}",), {}, "has gates, but experts have none"),
        (("model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]",), {}, "from has different layers or widths"),
        ((f"model.kept={[4] * 9}",), {}, "different layers or widths"),
        (("data.holdout=100",), {}, "held out here"),
    ):
        with pytest.raises(UserError, match=words):
            fit(mixture(start, *settings), tmp_path / "run", quiet=True, **options)
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"name its checkpoint by train\.start"):
        fit(tiny_config("model.gates=none", "model.experts=2"), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="no features to cluster images by"):
        create_model("drn_a_50", gates=None, experts=2, wide=0.1)
    with pytest.raises(UserError, match="neither gates nor exits"):
        create_model("resnet20", experts=2)


@pytest.mark.parametrize(
    ("experts", "words"),
    [(10**9, "damaged header: .*from 2 to 64"), (4, "does not fit its own model")],
)
def test_a_file_that_lies_about_its_experts_is_refused(
    experts: int, words: str, whole_run: FitResult, tmp_path: Path
) -> None:
    with safe_open(whole_run.checkpoint, framework="pt") as file:
        header = dict(file.metadata())
    config = json.loads(header["config"])
    assert config_from_dict(config).model.experts == EXPERTS
    config["model"]["experts"] = experts
    changed = header | {"config": json.dumps(config)}
    save_file(load_file(whole_run.checkpoint), tmp_path / "a", changed)
    with pytest.raises(UserError, match=words):
        load_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("taught", [False, True])
def test_on_a_gpu_its_steps_are_neither_compiled_nor_captured(
    taught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it learns itself, or others learn from it; other models' steps are."""
    mixed, plain = model_of()[0], create_model("resnet20", wide=0.25, classes=6)
    compiled: list[Objective] = []
    monkeypatch.setattr(Objective, "compile", lambda self, **_: compiled.append(self))
    monkeypatch.setattr("deepmoe.training.trainer.GraphedStep", lambda *_: "captured")
    fabric = SimpleNamespace(device=torch.device("cuda"), setup=lambda *parts: parts)
    monkeypatch.setattr(
        "deepmoe.training.trainer.EagerStep", lambda *_: EagerStep.__new__(EagerStep)
    )

    def step(model: Any, teachers: Teachers | None) -> object:
        trainer = SimpleNamespace(
            config=tiny_config(),
            fabric=fabric,
            model=model,
            teachers=teachers,
            optimizer=None,
            _loss=lambda _: DeepMoELoss(),
        )
        return Trainer.prepare(trainer, SimpleNamespace(frozen=False, by_turns=False))  # type: ignore[arg-type]

    made = step(plain, Teachers([mixed])) if taught else step(mixed, None)
    assert isinstance(made, EagerStep) and not compiled
    assert step(plain, None) == "captured" and len(compiled) == 1


def test_a_model_of_ones_own_network_is_trained(tmp_path: Path) -> None:
    """Its features are its own: no start is needed."""
    model, images = of_colours(experts=2), Colours([0.2, 1.5, 4.0])
    with evaluation_mode(model):
        before = model.embedding(images.x_BCHW)
    data: Any = list(zip(images.x_BCHW, (images.kinds > 1).long().tolist(), strict=True))
    config = tiny_config("train.epochs=1", "train.finetune_epochs=0", "train.batch_size=20")
    run = fit(model, data, data, config, tmp_path, quiet=True)
    assert run.model.has_centroids and torch.equal(run.model.embedding(images.x_BCHW), before)
    again = fit(of_colours(experts=2), data, data, config, tmp_path, resume=True, quiet=True)
    assert again.evaluation == run.evaluation
