"""Training end to end on image files: classification and segmentation."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from helpers import TINY_RUN, slow, tiny_config
from PIL import Image

from deepmoe.checkpoint import load_checkpoint
from deepmoe.config import load_config
from deepmoe.errors import UserError
from deepmoe.evaluation import predict
from deepmoe.training import FitResult, fit
from deepmoe.training.log import read_metrics

SHARED = Path(__file__).parents[3] / "shared" / "data"
FOLDER = (
    "data.name=image-folder",
    "data.size=32",
    "data.workers=0",
    "train.batch_size=4",
    "train.epochs=1",
    "train.finetune_epochs=1",
)
TINY_DRN = (
    "model.name=drn_a_50",
    f"model.widths={[4] * 32}",
    "embedding.widths=[4, 4]",
    "data.name=segmentation-pairs",
    "data.crop=[32, 40]",
    "data.workers=0",
    "train.batch_size=4",
    "train.epochs=1",
    "train.finetune_epochs=1",
)


def write_noise(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 32)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    high = 256 if mode == "RGB" else 3
    pixels = np.random.default_rng(len(path.name)).integers(0, high, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            for number in range(6):
                write_noise(folder / split / label / f"{number}.png")
    return folder


def decoded_by_others(classes: Path) -> list[str]:
    """Settings of a run of several epochs whose images other processes decode."""
    return [*FOLDER, f"data.root={classes}", "data.workers=2", "train.epochs=5"]


@pytest.fixture(scope="module")
def uninterrupted(classes, tmp_path_factory) -> FitResult:
    out = tmp_path_factory.mktemp("whole")
    return fit(tiny_config(*decoded_by_others(classes)), out, quiet=True)


def test_classification_skips_and_counts_unreadable_files(classes, tmp_path) -> None:
    classes = shutil.copytree(classes, tmp_path / "images")
    (classes / "train" / "cat" / "0.png").write_bytes(b"")
    overrides = [*FOLDER, f"data.root={classes}"]
    result = fit(tiny_config(*overrides, "data.unreadable_limit=0.2"), tmp_path / "run", quiet=True)
    assert result.evaluation.images == 12
    assert [m["skipped_images"] for m in read_metrics(result.metrics)] == [1, 1]
    with pytest.raises(UserError, match="1 of 12 files could not be read"):
        fit(tiny_config(*overrides), tmp_path / "strict", quiet=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT), slow(signal.SIGHUP)])
def test_a_signal_to_the_whole_group_saves_and_resumes(
    number, classes, uninterrupted, tmp_path
) -> None:
    """What `timeout`, SLURM and a terminal send reaches the decoding processes, too."""
    settings = decoded_by_others(classes)
    arguments = [a for setting in (*TINY_RUN, *settings) for a in ("--set", setting)]
    command = ["deepmoe", "train", "quickstart", *arguments, "--out", str(tmp_path / "run")]
    with Forked(command) as process:
        assert "epoch 1/6" in process.stdout.readline()
        os.killpg(process.pid, number)
        told = process.stderr.read()
    assert process.returncode == 75, told
    assert f"stopped by {number.name}" in told and len(told.splitlines()) == 1
    resumed = fit(tiny_config(*settings), tmp_path / "run", resume=True, quiet=True)
    for name, tensor in uninterrupted.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_prediction_takes_what_evaluation_would(classes, tmp_path) -> None:
    overrides = [*FOLDER, f"data.root={classes}", "model.gates=none"]
    result = fit(tiny_config(*overrides), tmp_path / "run", quiet=True)
    checkpoint = load_checkpoint(result.checkpoint)
    images = sorted((classes / "val").rglob("*.png"))
    predictions = predict(checkpoint, images)
    with torch.no_grad():
        logits = torch.cat([checkpoint.model(x).logits for x, _ in result.data.evaluation])
    probabilities, indices = logits.softmax(dim=1).max(dim=1)
    assert [p.label for p in predictions] == [("cat", "dog")[i] for i in indices]
    assert [p.probability for p in predictions] == pytest.approx(probabilities.tolist(), rel=1e-4)


def test_segmentation_trains_with_gates(tmp_path) -> None:
    for split in ("train", "test"):
        for number in range(4):
            write_noise(tmp_path / "data" / "images" / split / f"{number}.png")
            write_noise(tmp_path / "data" / "labels" / split / f"{number}.png", mode="L")
    overrides = [*TINY_DRN, f"data.root={tmp_path / 'data'}"]
    for form in ("classes", "latent"):
        config = tiny_config(*overrides, f"embedding.form={form}")
        result = fit(config, tmp_path / form, quiet=True)
        metrics = read_metrics(result.metrics)[-1]
        assert metrics["accuracy"] == metrics["mean_iou"] == result.evaluation.mean_iou
        assert set(metrics["iou"]) == {"class 0", "class 1", "class 2"}
        assert metrics["embedding_loss"] == 0
        assert 0 < metrics["active"] <= 1


@pytest.mark.skipif(not (SHARED / "imagenette").is_dir(), reason="the real images are absent")
def test_the_imagenet_path_on_real_images(tmp_path) -> None:
    config = load_config(
        "resnet18_imagenet_short",
        [
            f"data.root={SHARED / 'imagenette' / 'imagenette-mini.zip'}",
            f"model.widths={[4] * 8}",
            "model.wide=1",
            "embedding.widths=[4, 4, 4]",
            "data.size=32",
            "data.workers=2",
            "train.batch_size=250",
            "train.epochs=1",
            "train.device=cpu",
        ],
    )
    result = fit(config, tmp_path, quiet=True)
    assert result.data.info.classes == 10
    assert result.evaluation.images == 400
