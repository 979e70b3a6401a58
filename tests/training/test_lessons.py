"""What teachers say of training images, written down once."""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from helpers import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepmoe.checkpoint import load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import RunConfig, apply_overrides, load_config
from deepmoe.data import DataSource, Shard, open_data
from deepmoe.errors import TrainingInterrupted, UserError
from deepmoe.losses import DeepMoELoss, distance_from
from deepmoe.model import DeepMoEOutput
from deepmoe.training import FitResult, fit
from deepmoe.training.lessons import TaughtLoader, is_lessons, teach_from, write_lessons
from deepmoe.training.log import read_metrics
from deepmoe.training.teachers import Teachers
from deepmoe.training.trainer import Trainer

VIEWS = 3
DENSE = ("model.gates=none", "data.mirror=true", "train.epochs=1", "train.finetune_epochs=0")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return [
        fit(tiny_config(*DENSE, f"train.seed={seed}"), folder / str(seed), quiet=True).checkpoint
        for seed in (5, 6)
    ]


@pytest.fixture(scope="module")
def lessons(teachers: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lessons") / "lessons.safetensors"
    taught = teach_from(teachers, VIEWS, path)
    assert (taught.views, taught.images) == (VIEWS, 1437)
    return path


def test_teachers_of_networks_from_elsewhere_are_named(
    teachers: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One's own code runs only where it is named, and may stand beside the zoo's networks."""
    (tmp_path / "house.py").write_text(
        "from torch import nn\n"
        "def net(classes):\n"
        "    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *pooled, nn.Linear(8, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config("quickstart", ["model.name=house:net", "data.size=8", *DENSE])
    own = fit(config, tmp_path / "own", quiet=True).checkpoint
    together = (str(own), str(teachers[0]), "--views", "1", "--out")

    unnamed = CliRunner().invoke(main, ["teach", *together, str(tmp_path / "a")])
    assert unnamed.exit_code == 2 and "--network house:net" in unnamed.stderr
    named = [*together, str(tmp_path / "a b"), "--network", "house:net"]
    done = CliRunner().invoke(main, ["teach", *named])
    assert done.exit_code == 0, done.output
    assert is_lessons(str(tmp_path / "a b")) and f"'{tmp_path / 'a b'}'" in done.stdout
    wrong = ["teach", *together, str(tmp_path / "c"), "--network", "house:net", "--network", "x:y"]
    refused = CliRunner().invoke(main, wrong)
    assert refused.exit_code == 2 and "none of the teachers is made by x:y" in refused.stderr


def data_of(*settings: str, **options: object) -> DataSource:
    config = tiny_config(*DENSE, *settings)
    train = config.train
    return open_data(config.data, batch_size=train.batch_size, seed=train.seed, **options)


def taught(lessons: Path, *settings: str, **options: object) -> TaughtLoader:
    data = data_of(*settings, **options)
    return TaughtLoader(str(lessons), data.train, data.info)


@torch.no_grad()
@pytest.mark.parametrize("calibrate", [False, True])
def test_each_batch_comes_with_what_the_teachers_say_of_its_pixels(
    calibrate: bool, teachers: list[Path], lessons: Path
) -> None:
    """Also where images were set aside, so that the run has a part of them alone."""
    say = Teachers([load_checkpoint(path).model for path in teachers]).eval()
    loader = taught(lessons, "train.seed=3", calibrate=calibrate)
    assert len(loader.split) == (1437 - 179 if calibrate else 1437)
    for epoch in (0, VIEWS + 1):
        batches = list(loader.epoch(epoch))
        assert len(batches) == loader.batches_per_epoch
        for images, _, outputs in batches:
            torch.testing.assert_close(outputs.float(), say(images), rtol=2e-3, atol=2e-3)
        assert torch.equal(torch.cat([b[2] for b in batches[2:]]), outputs_from(loader, epoch, 2))


@pytest.mark.parametrize(("precision", "close"), [("64-true", 2e-3), ("bf16-mixed", 3e-2)])
def test_teachers_of_any_precision_are_written_down(
    precision: str, close: float, tmp_path: Path
) -> None:
    settings = (*DENSE, f"train.precision={precision}")
    teacher = fit(tiny_config(*settings), tmp_path / "teacher", quiet=True).checkpoint
    teach_from([teacher], 1, tmp_path / "lessons")
    images, _, outputs = next(taught(tmp_path / "lessons").epoch(0))
    model = load_checkpoint(teacher).model.eval()
    with torch.no_grad():
        said = model(model.as_input(images)).logits.to(outputs)
    torch.testing.assert_close(outputs, said, rtol=close, atol=close)


def test_teachers_of_different_precisions_look_together(
    teachers: list[Path], tmp_path: Path
) -> None:
    settings = (*DENSE, "train.precision=64-true")
    double = fit(tiny_config(*settings), tmp_path / "double", quiet=True).checkpoint
    teach_from([double, teachers[0]], 1, tmp_path / "lessons")
    images, _, outputs = next(taught(tmp_path / "lessons").epoch(0))
    models = [load_checkpoint(path).model.double() for path in (double, teachers[0])]
    said = Teachers(models).eval()(images.double()).to(outputs)
    torch.testing.assert_close(outputs, said, rtol=2e-3, atol=2e-3)


def outputs_from(loader: TaughtLoader, epoch: int, start: int) -> Tensor:
    return torch.cat([outputs for _, _, outputs in loader.epoch(epoch, start)])


def in_order(loader: TaughtLoader, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of an epoch's images as they come; the images and labels by these numbers."""
    numbers = torch.cat(list(loader.chosen(epoch)))
    images, labels, _ = (torch.cat(parts) for parts in zip(*loader.epoch(epoch), strict=True))
    order = numbers.argsort()
    return numbers, images[order], labels[order]


def test_views_come_again_and_the_order_never_does(lessons: Path) -> None:
    data = data_of("train.batch_size=1437")
    one = TaughtLoader(str(lessons), data.train, data.info)
    other = taught(lessons, "train.batch_size=1437", "train.seed=1")
    found = {epoch: in_order(one, epoch) for epoch in range(VIEWS + 1)}
    orders = [*(numbers for numbers, _, _ in found.values()), in_order(other, 0)[0]]
    assert len({tuple(order.tolist()) for order in orders}) == VIEWS + 2
    assert torch.equal(found[0][1], found[VIEWS][1])
    assert torch.equal(found[0][1], in_order(other, 0)[1])  # views are no run's own
    for _, images, labels in found.values():
        assert torch.equal(labels, data.train.split.labels)
        assert len(images) == 1437
    first, second = found[0][1], found[1][1]
    apart = (first != second).flatten(1).any(dim=1).double().mean()
    assert apart > 0.9  # of 3 x 3 places and a mirror
    mirrored = data.info.normalise(data.train.split.images).flip(3)
    assert (first == mirrored).flatten(1).all(dim=1).any()  # in the middle, and mirrored


def test_processes_share_batches(lessons: Path) -> None:
    whole = list(taught(lessons).epoch(1))
    shards = [list(taught(lessons, shard=Shard(rank, 2)).epoch(1)) for rank in (0, 1)]
    for batch, *parts in zip(whole, *shards, strict=True):
        for expected, *halves in zip(batch, *parts, strict=True):
            assert torch.equal(expected, torch.cat(halves))


@pytest.mark.parametrize(
    "setting",
    ["data.mirror=false", "data.crop_padding=2", "data.holdout=100", "data.size=9"],
)
def test_lessons_of_other_images_or_views_are_refused(setting: str, lessons: Path) -> None:
    with pytest.raises(UserError, match=r"was written for other training images") as told:
        taught(lessons, setting)
    assert "\n" not in str(told.value)


def test_lessons_of_other_classes_or_kinds_of_data_are_refused(lessons: Path) -> None:
    data = data_of()
    named = replace(data.info, class_names=tuple("abcdefghij"))
    with pytest.raises(UserError, match="or classes"):
        TaughtLoader(str(lessons), data.train, named)
    with pytest.raises(UserError, match="held in memory"):
        TaughtLoader(str(lessons), SimpleNamespace(), data.info)


def test_a_damaged_file_gets_one_sentence(lessons: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "damaged.safetensors", data_of()
    tensors = load_file(lessons)
    header = {"format": "deepmoe-lessons", "seed": "0", "looks": "[]"}
    images = {"images": tensors["images"]}
    for content, written in (
        (images, header),
        (tensors, {"format": "deepmoe-lessons"}),
        (tensors, {**header, "seed": "x"}),
        ({**images, "outputs": torch.zeros(3)}, header),
    ):
        save_file(content, path, written)
        assert is_lessons(str(path))
        with pytest.raises(
            UserError, match=r"damaged.safetensors is damaged: run deepmoe teach again"
        ):
            TaughtLoader(str(path), data.train, data.info)
    for odd in (torch.zeros(0, 1437, 10), torch.zeros(2, 5, 10)):  # no views, too few images
        save_file({**images, "outputs": odd}, path, header)
        with pytest.raises(UserError, match="was written for other training images"):
            TaughtLoader(str(path), data.train, data.info)
    path.write_bytes(lessons.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        fit(student(path), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_outputs_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    class Sure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logit = nn.Parameter(torch.tensor(1e9))  # more than a half can hold

        def forward(self, x_BCHW: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.logit.expand(len(x_BCHW), 10))

    data, path = data_of(), tmp_path / "lessons.safetensors"
    with pytest.raises(UserError, match="not finite"):
        write_lessons(path, Teachers([Sure()]), data.train, data.info, 1)
    assert not path.exists()


def student(teacher: object, *settings: str) -> RunConfig:
    where = f"train.teacher={json.dumps(teacher if isinstance(teacher, list) else str(teacher))}"
    return tiny_config(*DENSE, where, "loss.distillation=0.9", *settings)


def test_lessons_come_alone(lessons: Path, teachers: list[Path], tmp_path: Path) -> None:
    for both in ([str(lessons), str(teachers[0])], [str(lessons), str(lessons)]):
        with pytest.raises(UserError, match="a run takes that file and no others"):
            fit(student(both), tmp_path, quiet=True)
    with pytest.raises(UserError, match="no checkpoint at nowhere"):
        fit(student("nowhere"), tmp_path, quiet=True)


def test_a_run_learns_from_lessons_what_it_would_from_the_teachers(
    teachers: list[Path], tmp_path: Path
) -> None:
    """Where there is one view alone, so that both show the same pixels."""
    plain = ("data.mirror=false", "data.crop_padding=0")
    for name, path in (("a", teachers[0]), ("b", teachers[1])):
        loaded = load_checkpoint(path)
        config = apply_overrides(loaded.config, plain)
        save_checkpoint(tmp_path / name, loaded.model, config, loaded.info, loaded.state)
    paths = [tmp_path / "a", tmp_path / "b"]
    teach_from(paths, 1, tmp_path / "lessons")
    settings = (*plain, "model.gates=inner", "train.target_macs=0.6", "train.epochs=2")
    told = {
        name: read_metrics(
            fit(student(teacher, *settings), tmp_path / f"by {name}", quiet=True).metrics
        )
        for name, teacher in (("lessons", tmp_path / "lessons"), ("teachers", [*map(str, paths)]))
    }
    for one, other in zip(told["lessons"], told["teachers"], strict=True):
        for key in ("loss", "distillation_loss", "task_loss", "macs_share"):
            assert one[key] == pytest.approx(other[key], rel=0.02)
    assert told["lessons"][-1]["distillation_loss"] > 0


@pytest.fixture(scope="module")
def whole_run(lessons: Path, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    out = tmp_path_factory.mktemp("students") / "whole"
    return fit(student(lessons, "train.epochs=2"), out, quiet=True)


@pytest.mark.parametrize("stopped", ["within an epoch", "after an epoch"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    stopped: str, lessons: Path, whole_run: FitResult, tmp_path: Path, monkeypatch
) -> None:
    config, last = student(lessons, "train.epochs=2"), tmp_path / "last.safetensors"
    if stopped == "after an epoch":
        shutil.copy(whole_run.checkpoint.with_name("epoch-0001.safetensors"), last)
    else:
        original = Trainer._training_batches

        def with_signal(self: Trainer, epoch: int, start: int) -> Iterator[tuple[Tensor, ...]]:
            for i, item in enumerate(original(self, epoch, start), start):
                if (epoch, i) == (1, 2):
                    signal.raise_signal(signal.SIGTERM)
                yield item

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_training_batches", with_signal)
            with pytest.raises(TrainingInterrupted):
                fit(config, tmp_path, quiet=True)
        state = load_checkpoint(last).state
        assert (state.epoch, state.batch) == (1, 3)
    resumed = fit(config, tmp_path, resume=True, quiet=True)
    ours, theirs = load_file(last), load_file(whole_run.checkpoint)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert resumed.evaluation == whole_run.evaluation


def test_the_embedding_takes_its_share_of_what_teachers_say() -> None:
    output = DeepMoEOutput(torch.randn(4, 3), torch.randn(4, 3), None)
    labels, teacher = torch.tensor([0, 2, 1, 1]), torch.randn(4, 3)
    loss = DeepMoELoss(distillation=0.7, temperature=2.0, embedding_distillation=0.4)
    parts = loss.weighted(output, labels, 0.0, 0.5, teacher)
    ours, theirs = ((z / 2).softmax(dim=1) for z in (output.embedding_logits, teacher))
    distance = 4 * (theirs * (theirs / ours).log()).sum(dim=1)
    torch.testing.assert_close(distance_from(teacher, output.embedding_logits, 2.0), distance)
    own = F.cross_entropy(output.embedding_logits, labels)
    torch.testing.assert_close(parts.embedding, 0.6 * own + 0.4 * distance.mean())
    task = 0.3 * parts.task + 0.7 * parts.distillation
    torch.testing.assert_close(parts.total, task + 0.5 * parts.embedding)
    # Not without a teacher, nor where it is not asked for.
    torch.testing.assert_close(loss.weighted(output, labels, 0.0, 0.5).embedding, own)
    torch.testing.assert_close(
        DeepMoELoss(distillation=0.7).weighted(output, labels, 0.0, 0.5, teacher).embedding, own
    )


def test_of_pixels_an_embedding_learns_nothing() -> None:
    output = DeepMoEOutput(torch.randn(2, 3, 4, 4), torch.randn(2, 3), None)
    loss = DeepMoELoss(distillation=0.7, embedding_distillation=0.4)
    labels, teacher = torch.randint(3, (2, 4, 4)), torch.randn(2, 3, 4, 4)
    parts = loss.weighted(output, labels, 0.0, 1.0, teacher)
    assert parts.embedding == 0 < parts.distillation


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_the_verb_writes_what_a_run_takes(
    teachers: list[Path], lessons: Path, tmp_path: Path
) -> None:
    out = tmp_path / "lessons.safetensors"
    done = deepmoe("teach", *teachers, "--views", VIEWS, "--out", out)
    assert done.exit_code == 0, done.output
    assert "3 views of 1,437 images" in done.output
    written, expected = load_file(out), load_file(lessons)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)


def test_mistakes_get_one_sentence(teachers: list[Path], lessons: Path, tmp_path: Path) -> None:
    loaded, out = load_checkpoint(teachers[0]), tmp_path / "out.safetensors"
    held, named = tmp_path / "held.safetensors", tmp_path / "named.safetensors"
    config = apply_overrides(loaded.config, ["data.holdout=100"])
    save_checkpoint(held, loaded.model, config, loaded.info, loaded.state)
    info = replace(loaded.info, class_names=tuple("abcdefghij"))
    save_checkpoint(named, loaded.model, loaded.config, info, loaded.state)
    for arguments, words in (
        ([teachers[0], "--views", 0], "from 1 to 10,000, not 0"),
        ([teachers[0], "--views", 10_001], "from 1 to 10,000"),
        ([teachers[0], "--views", 1, "--set", "data.holdout=100"], "that they were trained on"),
        ([teachers[0], held], f"{held} was trained on other images than {teachers[0]}"),
        ([teachers[0], named], "was trained on other images"),
        ([tmp_path / "nowhere"], "no checkpoint at"),
        ([lessons], "not a deepmoe checkpoint"),
        ([], "CHECKPOINTS"),
    ):
        done = deepmoe("teach", *arguments, "--out", out)
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
        (line,) = done.stderr.splitlines()
        assert line.startswith("Error: ") and words in line
        assert not out.exists()
    before = lessons.read_bytes()
    done = deepmoe("teach", teachers[0], "--out", lessons)
    assert done.exit_code == 2 and "already exists" in done.stderr
    assert lessons.read_bytes() == before
