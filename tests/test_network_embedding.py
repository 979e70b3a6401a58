"""A narrow network in the embedding's place: what is left of the start looks first."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import assert_same_weights, counted_macs, randomise_statistics, tiny_config
from torch import Tensor

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.config import EmbeddingConfig, RunConfig, load_config
from deepmoe.configured_models import config_of
from deepmoe.costs import count_costs, count_macs
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.model import DeepMoE, confidence
from deepmoe.network_embedding import NetworkEmbedding
from deepmoe.pruning import prune
from deepmoe.registry import create_model
from deepmoe.sparse import sparsify
from deepmoe.training import FitResult, fit

WIDTHS = "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]"
ONE_EPOCH = ("train.epochs=1", "train.finetune_epochs=0", WIDTHS)
STILL = (*ONE_EPOCH, "train.lr=1e-12", "train.weight_decay=0")


@pytest.fixture(scope="module", autouse=True)
def _few_are_judged() -> Iterator[None]:
    """Runs judge channels by fewer images than they would, to be done soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepmoe.compare.taylor.JUDGED_IMAGES", 256)
        yield


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    config = tiny_config("model.gates=none", *ONE_EPOCH)
    return fit(config, tmp_path_factory.mktemp("start"), quiet=True)


def looking(start: FitResult, *settings: str) -> RunConfig:
    """Two epochs of the start, with what is left of it in the embedding's place."""
    first = ("embedding.form=network", "embedding.prune=0.6", f"train.start={start.checkpoint}")
    exits = ("model.gates=none", "model.exits=true", WIDTHS)
    return tiny_config(*first, *exits, "train.epochs=2", "train.finetune_epochs=0", *settings)


@pytest.fixture(scope="module")
def whole_run(start: FitResult, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    return fit(looking(start), tmp_path_factory.mktemp("whole"), quiet=True)


def test_the_start_itself_and_what_is_left_of_it_begin_a_run(
    start: FitResult, tmp_path: Path
) -> None:
    run = fit(looking(start, "train.prune=0.8", *STILL), tmp_path, quiet=True)
    config = tiny_config()
    data = open_data(config.data, batch_size=config.train.batch_size)
    trained = load_checkpoint(start.checkpoint).model
    for share, network, kept in (
        (0.8, run.model.network, run.model.source.kept),
        (0.6, run.model.embedding.network, run.model.embedding.kept),
    ):
        small = prune(trained, data.info.size, share, data.train)
        assert kept == small.source.kept
        expected = dict(small.network.named_parameters())
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(parameter, expected[name])
    assert run.evaluation.dense_macs == start.evaluation.dense_macs


def test_a_run_counts_both_networks(start: FitResult, whole_run: FitResult) -> None:
    model, x = whole_run.model, torch.randn(1, 3, 8, 8)
    first, whole = (counted_macs(n, x) for n in (model.embedding.network, model.network))
    assert model.embedding.macs(8, 8) == count_costs(model, 8).embedding_macs == first
    dense = start.evaluation.dense_macs
    assert 0.4 * dense < first <= 0.6 * dense and whole == dense
    result = whole_run.evaluation
    assert (result.macs, result.dense_macs) == (first + whole, dense)
    assert result.embedding_accuracy is not None


@torch.no_grad()
def test_a_run_leaves_what_gives_the_same_model(whole_run: FitResult) -> None:
    loaded, x = load_checkpoint(whole_run.checkpoint), torch.randn(6, 3, 8, 8)
    assert isinstance(loaded.model.embedding, NetworkEmbedding)
    for ours, theirs in zip(loaded.model(x)[:2], whole_run.model(x)[:2], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert loaded.config.embedding.kept == whole_run.model.embedding.kept
    assert loaded.config.model.kept is None and loaded.model.unpruned is None
    # In training, both have moved away from each other.
    ours, theirs = (m.fc.weight for m in (loaded.model.network, loaded.model.embedding.network))
    assert not torch.equal(ours, theirs)


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    start: FitResult, whole_run: FitResult, tmp_path: Path
) -> None:
    first = whole_run.checkpoint.with_name("epoch-0001.safetensors")
    shutil.copy(first, tmp_path / "last.safetensors")
    resumed = fit(looking(start), tmp_path, resume=True, quiet=True)
    assert_same_weights(resumed.checkpoint, whole_run.checkpoint)
    assert resumed.evaluation == whole_run.evaluation


def test_the_configuration_that_a_run_leaves_gives_the_same_run(
    whole_run: FitResult, tmp_path: Path
) -> None:
    left = load_config(whole_run.checkpoint.with_name("config.toml"))
    assert left.embedding.kept is not None
    assert_same_weights(fit(left, tmp_path, quiet=True).checkpoint, whole_run.checkpoint)


def test_a_run_may_go_on_from_such_a_model(whole_run: FitResult, tmp_path: Path) -> None:
    """By naming what is left, and pruning no more."""
    kept = list(whole_run.model.embedding.kept)
    config = tiny_config(
        "model.gates=none",
        "model.exits=true",
        "embedding.form=network",
        f"embedding.kept={kept}",
        f"train.start={whole_run.checkpoint}",
        *STILL,
    )
    run = fit(config, tmp_path, quiet=True)
    expected = dict(whole_run.model.embedding.named_parameters())
    for name, parameter in run.model.embedding.named_parameters():
        torch.testing.assert_close(parameter, expected[name])


def test_its_answer_makes_gates(start: FitResult, tmp_path: Path) -> None:
    settings = ("model.gates=inner", "train.epochs=1", "train.target_macs=0.9")
    run = fit(looking(start, *settings), tmp_path, quiet=True)
    model = run.model
    assert model.gated and model.heads.weight.shape == (9 * 8, 10)
    assert 0.8 < run.evaluation.macs_share < 1
    x = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        loaded = load_checkpoint(run.checkpoint).model
        torch.testing.assert_close(loaded(x).logits, model(x).logits)
        mixture, logits = model.embedding(x)
    torch.testing.assert_close(mixture, logits.softmax(dim=1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("embedding.prune=0.01",), r"can't leave 0\.01 of the MACs"),
        (("model.widths=[4, 4, 4, 4, 4, 4, 4, 4, 4]",), "different layers or widths"),
    ],
)
def test_what_can_not_be_left_gets_one_sentence(
    settings: tuple[str, ...], words: str, start: FitResult, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        fit(looking(start, *settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_start_with_a_shallow_embedding_gets_one_sentence(tmp_path: Path) -> None:
    settings = ("model.gates=none", "model.exits=true", *ONE_EPOCH)
    shallow = fit(tiny_config(*settings), tmp_path / "shallow", quiet=True)
    with pytest.raises(UserError, match="a different form or size"):
        fit(looking(shallow), tmp_path / "run", quiet=True)


def model_of(gates: str | None, **options: bool) -> DeepMoE:
    """A made-up model whose embedding has about half of the channels."""
    torch.manual_seed(0)
    graph = create_model("resnet20", classes=6, wide=0.5, gates=None).gating.graph
    kept = tuple(width // 2 for width in prunable(graph).widths)
    embedding = EmbeddingConfig(form="network", kept=kept, **options)
    model = create_model(
        "resnet20", classes=6, wide=0.5, gates=gates, exits=True, embedding=embedding
    ).eval()
    if model.heads is not None:
        torch.nn.init.normal_(model.heads.weight)
    return randomise_statistics(model)


@torch.inference_mode()
@pytest.mark.parametrize("gates", [None, "inner"])
def test_the_sparse_engine_gives_the_same(gates: str | None) -> None:
    model, x = model_of(gates), torch.randn(8, 3, 32, 32)
    sure = confidence(model.embedding(x)[1]).sort().values
    model.exit_at = (sure[3] + sure[4]) / 2
    sparse = sparsify(model)
    for images in (x, x[:1], x[4:]):
        expected, output = model(images), sparse(images)
        assert torch.equal(output.exited, expected.exited)
        for ours, theirs in zip(output[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert 0 < model(x).exited.sum() < len(x)
    macs = count_macs(model, 32, model(x).gates, model(x).exited)
    assert (macs == counted_macs(model.embedding.network, x[:1])).sum() == 4


@torch.no_grad()
def test_a_file_gives_back_the_same_model(tmp_path: Path) -> None:
    model, x = model_of("inner", task_gradient=False), torch.randn(4, 3, 32, 32)
    info = DataInfo(tuple("abcdef"), (32, 32), (0.5,) * 3, (0.5,) * 3)
    save_checkpoint(tmp_path / "a", model, config_of(model), info, TrainState())
    loaded = load_checkpoint(tmp_path / "a").model
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert not loaded.embedding.task_gradient


@pytest.mark.parametrize("task_gradient", [True, False])
def test_the_task_teaches_it_or_not(task_gradient: bool) -> None:
    embedding = model_of("inner", task_gradient=task_gradient).embedding
    mixture, logits = embedding(torch.randn(2, 3, 32, 32))
    assert mixture.requires_grad == task_gradient
    logits.square().sum().backward()  # its own loss always does
    weight: Tensor = embedding.network.fc.weight
    assert weight.grad.abs().sum() > 0


def test_its_weights_are_its_own() -> None:
    model = model_of(None)
    shared = {id(p) for p in model.network.parameters()} & {
        id(p) for p in model.embedding.parameters()
    }
    assert not shared
    with pytest.raises(UserError, match="one number for each of 9 groups"):
        create_model(
            "resnet20", exits=True, gates=None, embedding=EmbeddingConfig("network", kept=(3,))
        )
