"""`deepmoe analyze` and `deepmoe report` on every kind of checkpoint."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from helpers import tiny_config
from PIL import Image

from deepmoe.checkpoint import TrainState, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.data import DataInfo, open_data
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE, confidence

QUICK = ("--images", "40")
HOSTILE = ('<script>alert("0")</script>', "$\\frac{", "<img src=x onerror=alert(1)>", "a\u202eb")


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def made(*settings: str) -> tuple[DeepMoE, RunConfig, DataInfo]:
    """An untrained model of a tiny run, whose gates differ between images."""
    torch.manual_seed(1)
    config = tiny_config("heads.init=normal(0.2, 1)", *settings)
    data = open_data(config.data, batch_size=8)
    model = model_from_config(config, data.info.classes, size=data.info.size).eval()
    if model.gated:
        torch.nn.init.normal_(model.embedding.project.weight, std=4.0)
    return model, config, data.info


def saved(path: Path, model: DeepMoE, config: RunConfig, info: DataInfo) -> Path:
    save_checkpoint(path, model, config, info, TrainState())
    return path


def of_kind(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.safetensors"
    if kind == "segmentation":
        return saved(path, *_segmentation(folder))
    settings = {
        "dense": ("model.gates=none",),
        "experts": (
            "model.gates=none",
            "model.experts=3",
            "train.start=a",
            "train.finetune_epochs=0",
        ),
    }
    model, config, info = made(*settings.get(kind, ()))
    batch = next(iter(open_data(config.data, batch_size=8).evaluation))[0][:40]
    with torch.no_grad():
        if kind == "exits":
            model.exit_at = confidence(model(batch).embedding_logits).median()
            model.exit_vote = torch.tensor(0.25)
            named = dataclasses.replace(config.model, exits=True)
            config = dataclasses.replace(config, model=named)
        if kind == "codes":
            codes_KC = torch.cat(model.route(batch)[0], dim=1)[:3]
            widths = model.gating.widths
            model.codebook = RouteCodebook(codes_KC, torch.ones(codes_KC.shape[1]), widths)
        if kind == "experts":
            model.centroids.copy_(model.embedding(batch[:3]))
    return saved(path, model, config, info)


def _segmentation(folder: Path) -> tuple[DeepMoE, RunConfig, DataInfo]:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for kind, shape, high in (("images", (32, 40, 3), 256), ("labels", (32, 40), 3)):
            for number in range(2):
                path = folder / "streets" / kind / split / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, high, shape).astype(np.uint8)).save(path)
    return made(
        "model.name=drn_a_50",
        f"model.widths={[4] * 32}",
        "data.name=segmentation-pairs",
        f"data.root={folder / 'streets'}",
        "data.crop=[32, 40]",
        "data.workers=0",
    )


class Parsed(HTMLParser):
    """Tags of a page, their sources, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, text: str) -> None:
        self.text += text


def parsed(path: Path) -> Parsed:
    """A page that is whole, and asks for nothing outside of itself."""
    page = path.read_text()
    assert page.rstrip().endswith("</html>")
    found = Parsed(page)
    assert not found.tags & {"script", "link", "iframe"}
    assert all(source.startswith("data:image/") for source in found.sources)
    assert "url(" not in page and "@import" not in page
    found.text = re.sub(r"\s+", " ", found.text)
    return found


@pytest.mark.parametrize(
    ("kind", "variants", "words", "missing"),
    [
        ("dense", ["dense"], ["The network has no gates", "All of them cost the same"], ["Exits"]),
        (
            "gated",
            ["dense", "masked", "narrowed"],
            ["Routes by class", "Gates of other classes", "stage 1, block 1, conv 1", "Memory"],
            ["What does not apply", "Exits"],
        ),
        (
            "exits",
            ["dense", "masked", "narrowed"],
            ["answered by the embedding", "20", "a vote of 25%"],
            [],
        ),
        (
            "codes",
            ["dense", "masked", "narrowed", "codebook"],
            ["The routes of a codebook are fixed", "take 3 routes"],
            ["Accuracy against cost"],
        ),
        ("experts", ["dense", "experts"], ["Experts by class", "no gates"], ["Routes by class"]),
        (
            "segmentation",
            ["dense", "masked", "narrowed"],
            ["reaches a mean IoU", "streets", "Each pixel has a class", "of the pixels right"],
            ["Routes by class", "Gates of other classes"],
        ),
    ],
)
def test_every_kind_is_analysed_as_far_as_it_goes(
    kind: str, variants: list[str], words: list[str], missing: list[str], tmp_path: Path
) -> None:
    checkpoint, out = of_kind(kind, tmp_path), tmp_path / "an out"
    shuffled = ("--shuffle", "10", "--draws", "2")
    result = deepmoe("analyze", checkpoint, "--out", out, *shuffled, *QUICK)
    assert result.exit_code == 0, result.output
    assert f"deepmoe report {checkpoint}" in result.output.splitlines()[-1]
    page = parsed(out / "index.html")
    for word in words:
        assert word in page.text
    for word in missing:
        assert word not in page.text
    values = json.loads((out / "analysis.json").read_text())["values"]
    assert [v["name"] for v in values["memory"]["variants"]] == variants
    assert (values["shuffling"] is None) == (kind in ("dense", "experts", "segmentation"))
    assert (values["routes"] is None) == (kind in ("dense", "experts"))
    for path in out.glob("*.png"):
        Image.open(path).verify()
    assert (out / "gates_by_class.png").exists() == (values["routes"] is not None)
    assert not list(out.glob("*.tmp"))


@pytest.fixture(scope="module")
def gated(tmp_path_factory) -> Path:
    return of_kind("gated", tmp_path_factory.mktemp("gated"))


def test_figures_are_those_of_the_other_verbs(gated: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = deepmoe(
        "report", gated, "--out", page, "--beside", of_kind("dense", tmp_path), "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    evaluated = json.loads(deepmoe("eval", gated, "--json").stdout)
    for key, value in found["evaluation"].items():
        assert evaluated[key] == value
    assert found["macs_percentiles"]["0"] == found["cheapest"][0]["macs"]
    assert found["macs_percentiles"]["100"] == found["dearest"][0]["macs"]
    assert found["routes"]["images"] == 360 == sum(found["routes"]["counts"])
    assert found["shuffling"] is None and found["memory"] is None
    text = parsed(page).text
    assert f"recognises {evaluated['accuracy']:.1%} of 360 digits images (test)" in text
    assert "resnet20 (" in text and "accurate than" in text
    # A second page replaces the first; something else is never replaced.
    assert deepmoe("report", gated, "--out", page, *QUICK).exit_code == 0
    assert "of 40 digits images" in parsed(page).text


def test_a_class_can_be_shuffled_by_itself(gated: Path, tmp_path: Path) -> None:
    asked = ("--class", "3", "--shuffle", "0", "--draws", "1", *QUICK)
    result = deepmoe("analyze", gated, "--out", tmp_path / "a", *asked)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "a" / "analysis.json").read_text())
    assert written["command"].endswith("--shuffle 0 --draws 1 --class 3 --images 40")
    values = written["values"]
    assert values["shuffling"] is None
    three = values["class_shuffling"]["classes"][3]
    assert three["images"] > 0 and three["shuffled"] is not None
    assert values["class_shuffling"]["draws"] == 9


def test_names_of_classes_and_files_stay_text(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in range(4):
            path = tmp_path / "data" / split / f"c{number}" / "0.png"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (8, 8), (60 * number, 9, 9)).save(path)
    root = ("data.name=image-folder", f"data.root={tmp_path / 'data'}", "data.workers=0")
    model, config, info = made(*root, "data.size=8", "train.batch_size=4")
    for number, name in enumerate(HOSTILE):  # as somebody might hand over checkpoint and data
        safe = name.replace("/", "\u2044")
        for split in ("train", "val"):
            (tmp_path / "data" / split / f"c{number}").rename(tmp_path / "data" / split / safe)
    info = dataclasses.replace(
        info, class_names=tuple(sorted(n.replace("/", "\u2044") for n in HOSTILE))
    )
    checkpoint = saved(tmp_path / "<b>bold.safetensors", model, config, info)
    result = deepmoe("analyze", checkpoint, "--out", tmp_path / "out", "--draws", "1")
    assert result.exit_code == 0, result.output
    page = parsed(tmp_path / "out" / "index.html")
    assert "onerror" not in page.attributes
    assert '<script>alert("0")' in page.text and "a\\u202eb" in page.text
    assert "<b>bold.safetensors" in page.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("report", "--out", "folder"), "is a folder"),
        (("report", "--out", "notes.txt"), "not a deepmoe report"),
        (("report", "--out", "/dev/null"), "not a deepmoe report"),
        (("report", "--out", "notes.txt/page.html"), "is not a folder"),
        (("analyze", "--out", "notes.txt"), "is a file"),
        (("analyze", "--out", "folder"), "holds other files"),
        (("analyze", "--out", "notes.txt/out"), "is not a folder"),
        (("analyze", "--out", "new", "--class", "emu"), "no class named emu"),
        (("analyze", "--out", "new", "--class", "3", "--images", "1"), "all of one class"),
        (("analyze", "--out", "new", "--images", "0"), "--images"),
        (("report", "--out", "new", "--set", "train.lr=1"), "data.*, train.device"),
        (("report", "--out", "new", "--set", "data.name=nowhere"), "nowhere"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing_behind(
    arguments: tuple[str, ...], words: str, gated: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    result = deepmoe(arguments[0], gated, *arguments[1:])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_analysis_is_written_whole_or_not_at_all(gated: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert deepmoe("analyze", gated, "--out", out, "--shuffle", "0", *QUICK).exit_code == 0
    files = {path: path.read_bytes() for path in out.iterdir()}
    again = deepmoe("analyze", gated, "--out", out, "--shuffle", "5", "--draws", "1", *QUICK)
    assert again.exit_code == 0 and (out / "shuffling_by_pair.png").exists()
    assert deepmoe("analyze", gated, "--out", out, "--shuffle", "0", *QUICK).exit_code == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in files}  # no old plots
    files = {path: path.read_bytes() for path in out.iterdir()}
    (out / "layers.png").unlink()
    (out / "layers.png").mkdir()  # can't be replaced by a file
    result = deepmoe("analyze", gated, "--out", out, "--shuffle", "0", "--images", "20")
    assert result.exit_code == 2 and "layers.png is a folder" in result.stderr
    (out / "layers.png").rmdir()
    left = {path: path.read_bytes() for path in out.iterdir()}
    assert left == {path: content for path, content in files.items() if path.name != "layers.png"}


def test_a_file_of_any_length_is_no_report(tmp_path: Path) -> None:
    """It is not read whole to find that out."""
    path = tmp_path / "report.html"
    with path.open("wb") as file:
        file.truncate(2**40)  # of which nothing is on the disk
    result = deepmoe("report", "m", "--out", path)
    assert result.exit_code == 2 and "is not a deepmoe report" in result.stderr
