"""Predictions: of files, folders and patterns; as tables, and as pictures of segmentations."""

import csv
import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers import tiny_config
from pair_files import write_pairs
from PIL import Image

import deepmoe
from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.cli import main
from deepmoe.configured_models import model_from_config
from deepmoe.data import DataInfo, open_data
from deepmoe.errors import UserError
from deepmoe.evaluation.segmentation_prediction import OPACITY, legend, palette

NAMES = ("=1+1", "-cat", "dog, or so", *(f"class {i}" for i in range(7)))
TINY_DRN = (
    "model.name=drn_a_50",
    f"model.widths={[4] * 32}",
    "embedding.widths=[4, 4]",
    "data.name=segmentation-pairs",
    "data.crop=[24, 40]",
    "data.workers=0",
)


def deepmoe_cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """An untrained classifier, whose classes have awkward names."""
    config, path = tiny_config(), tmp_path_factory.mktemp("model") / "a model.safetensors"
    info = DataInfo(NAMES, (8, 8), (0.5,) * 3, (0.25,) * 3)
    save_checkpoint(path, model_from_config(config, 10), config, info, TrainState())
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three images at two depths, one that is broken, and a file that is no image."""
    folder = tmp_path / "my photos"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("b.PNG", "a.jpg", "more/c.png")):
        Image.new("L", (9, 8), 60 * number).save(folder / name)
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no image, and nobody says so")
    return folder


def test_folders_and_patterns_stand_for_their_images(checkpoint, photos) -> None:
    found = deepmoe_cli("predict", checkpoint, photos, "--json")
    answers = json.loads(found.stdout)
    names = ["a.jpg", "b.PNG", "broken.png", "more/c.png"]
    assert [a["image"] for a in answers] == [str(photos / name) for name in names]
    assert [i for i, a in enumerate(answers) if "error" in a] == [2] and found.exit_code == 2
    assert found.stderr.splitlines() == [f"Error: {answers[2]['error']}"]
    fitting = deepmoe_cli("predict", checkpoint, f"{photos}/**/*.png", "--json", "--top", 99)
    broken, small = json.loads(fitting.stdout)
    assert "error" in broken and len(small["top"]) == 10
    assert sum(guess["probability"] for guess in small["top"]) == pytest.approx(1, abs=1e-5)
    (photos / "empty").mkdir()
    for nothing in (photos / "empty", photos / "*.webp"):
        told = deepmoe_cli("predict", checkpoint, nothing, photos / "a.jpg")
        assert told.exit_code == 2 and str(nothing) in told.stderr and "a.jpg: " in told.stdout


def test_the_command_prints_predictions_and_what_to_type_next(checkpoint, photos) -> None:
    loaded, files = load_checkpoint(checkpoint), [photos / "a.jpg", photos / "b.PNG"]
    told = deepmoe_cli("predict", checkpoint, *files, "--top", 2).stdout.splitlines()
    for line, prediction in zip(told, deepmoe.predict(loaded, files, top=2), strict=False):
        assert line.partition(";")[0] == str(prediction).partition(";")[0]
        assert len(prediction.top) == 2 and prediction.ms > 0
        assert prediction.as_dict()["top"][0]["label"] == prediction.label in NAMES
        assert f"{prediction.probability:.1%}" in line and " MACs (" in line and " ms" in line
        (axes,) = prediction.plot().axes
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(
            [100 * p for _, p in prediction.top]
        )
        with pytest.raises(dataclasses.FrozenInstanceError):
            prediction.ms = 0
    assert told[-2].startswith("2 images: ")
    assert told[-1] == f"next: deepmoe bench sparse '{checkpoint}'"


def test_names_in_a_csv_are_data_to_a_spreadsheet(checkpoint, photos, tmp_path) -> None:
    table = tmp_path / "answers.csv"
    deepmoe_cli("predict", checkpoint, photos, "--csv", table, "--top", 10)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [Path(row["image"]).name for row in rows] == ["a.jpg", "b.PNG", "broken.png", "c.png"]
    assert "not an image" in rows[2]["error"] and not rows[2]["label"]
    labels = {rows[0][key] for key in rows[0] if key.startswith("label")}
    assert labels == {"'=1+1", "'-cat", *NAMES[2:]}  # a comma is quoted, a formula is text
    assert float(rows[0]["probability"]) > float(rows[0]["probability_2"]) > 0
    assert int(rows[0]["macs"]) > 0 and float(rows[0]["ms"]) > 0
    deepmoe_cli("predict", checkpoint, photos / "a.jpg", "--csv", table)
    assert len(table.read_text().splitlines()) == 2  # our own is replaced
    own = checkpoint.read_bytes()
    for bad in (tmp_path, table / "below.csv", checkpoint, photos / "a.jpg", "/dev/null"):
        refused = deepmoe_cli("predict", checkpoint, photos / "a.jpg", "--csv", bad)
        assert refused.exit_code == 2 and "Error: " in refused.stderr
        assert not refused.stdout  # before any work
    assert checkpoint.read_bytes() == own and not Path("/dev/null").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_of_files_that_are_no_text_are_in_the_csv(checkpoint, photos, tmp_path) -> None:
    table, odd = tmp_path / "answers.csv", Path(os.fsdecode(os.fsencode(photos) + b"/odd\xff.png"))
    (photos / "b.PNG").rename(odd)
    assert deepmoe_cli("predict", checkpoint, odd, "--csv", table).exit_code == 0
    assert "odd\\udcff.png," in table.read_text(encoding="utf-8")


def test_what_can_not_be_asked_gets_one_sentence(checkpoint, photos, tmp_path) -> None:
    for wrong, word in ((("--top", 0), "at least 1"), (("--out", tmp_path), "segmentation")):
        refused = deepmoe_cli("predict", checkpoint, photos / "a.jpg", *wrong)
        assert refused.exit_code == 2 and word in refused.stderr, refused.output
        assert len(refused.stderr.splitlines()) == 1
    loaded = load_checkpoint(checkpoint)
    for model, images, top, words in (
        (loaded, "a.jpg", 3, "list of image files"),
        (loaded, [0], 3, "names of image files, not 0"),
        (loaded, ["a.jpg"], 1.5, "at least 1"),
        (loaded.model, ["a.jpg"], 3, "takes a checkpoint"),
    ):
        with pytest.raises(UserError, match=words):
            deepmoe.predict(model, images, top)


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    config = tiny_config(*TINY_DRN, f"data.root={write_pairs(folder)}")
    info = open_data(config.data, batch_size=1).info
    path = folder / "model.safetensors"
    model = model_from_config(config, info.classes, size=info.size)
    save_checkpoint(path, model, config, info, TrainState())
    return path


def test_a_segmentation_leaves_its_pictures(segmenter, tmp_path) -> None:
    folder, out = segmenter.parent / "images" / "test", tmp_path / "pictures"
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "image3.png"
    Image.new("RGB", (17, 13), (10, 200, 30)).save(twin)  # of another size
    found = deepmoe_cli("predict", segmenter, folder, twin, "--out", out, "--json")
    assert found.exit_code == 0, found.output
    first, _, last = json.loads(found.stdout)
    assert last["size"] == [13, 17] and Path(last["pictures"][0]).name == "image3_.classes.png"
    expected = deepmoe.predict(load_checkpoint(segmenter), [folder / "image3.png"])[0]
    coloured, overlay = (Image.open(path) for path in first["pictures"])
    labels = np.asarray(coloured)
    assert np.array_equal(labels, expected.labels_HW)  # the values are the classes
    colours = palette(5)[labels]
    assert np.array_equal(np.asarray(coloured.convert("RGB")), colours)
    pixels = np.asarray(Image.open(folder / "image3.png").convert("RGB"))
    mixed = np.rint(OPACITY * colours + (1 - OPACITY) * pixels).astype(np.uint8)
    assert np.array_equal(np.asarray(overlay), mixed)
    shares = {guess["label"]: guess["share"] for guess in first["top"]}
    names = [f"class {i}" for i in range(5)]
    assert all(np.mean(labels == names.index(n)) == pytest.approx(s) for n, s in shares.items())
    key = np.asarray(Image.open(out / "legend.png").convert("RGB")).reshape(-1, 3)
    assert {tuple(c) for c in palette(5).tolist()} <= {tuple(c) for c in key.tolist()}
    assert str(expected).startswith(f"{folder / 'image3.png'}: class ") and expected.plot().axes
    again = deepmoe_cli("predict", segmenter, tmp_path, "--out", out, "--json")
    assert [a["image"] for a in json.loads(again.stdout)] == [str(twin)]  # not our own pictures


def test_pictures_replace_nothing_but_pictures(segmenter, tmp_path) -> None:
    image = tmp_path / "a.png"
    Image.new("RGB", (17, 13)).save(image)
    (tmp_path / "a.overlay.png").write_text("mine")
    for _ in range(2):
        done = deepmoe_cli("predict", segmenter, image, "--out", tmp_path, "--json")
        (answer,) = json.loads(done.stdout)
        names = [Path(path).name for path in answer["pictures"]]
        assert names == ["a_.classes.png", "a_.overlay.png"]  # our own, also the second time
    assert (tmp_path / "a.overlay.png").read_text() == "mine"
    same = deepmoe_cli("predict", segmenter, tmp_path, "--out", tmp_path)
    assert same.exit_code == 2 and "a folder of its own" in same.stderr
    image.rename(tmp_path / "legend.png")
    before = (tmp_path / "legend.png").read_bytes()
    refused = deepmoe_cli("predict", segmenter, tmp_path / "a_.classes.png", "--out", tmp_path)
    assert refused.exit_code == 2 and "legend.png is there already" in refused.stderr
    assert (tmp_path / "legend.png").read_bytes() == before


def test_colours_of_classes_differ() -> None:
    for classes in (2, 19, 255):
        assert len({tuple(colour) for colour in palette(classes).tolist()}) == classes
    assert legend(["ö", "\x1b[31m", "漢"]).size[1] > 3 * 16
