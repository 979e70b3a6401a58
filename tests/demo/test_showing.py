"""What a demo shows of an image is what the model itself does with it."""

import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from demo_models import NAMES, OF_KIND, make
from PIL import Image

from deepmoe.cli import main
from deepmoe.costs import count_macs, dense_macs
from deepmoe.data import open_data
from deepmoe.demo import Demo, showing
from deepmoe.demo.budgets import Slider
from deepmoe.demo.cards import answer_card, error_card, image_card
from deepmoe.demo.server import SAMPLES, sample_images
from deepmoe.errors import UserError

KINDS = tuple(OF_KIND)


@pytest.fixture(autouse=True)
def _one_run_is_enough(monkeypatch) -> None:
    for name in ("WARM_UP_ROUNDS", "TIMED_ROUNDS"):
        monkeypatch.setattr(showing, name, 1)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_is_shown_as_it_runs(kind: str, image: Path) -> None:
    checkpoint = make(kind)
    demo = Demo(checkpoint)
    shown = demo.show(image)
    model, info = checkpoint.model, checkpoint.info
    x_BCHW = info.normalise(torch.from_numpy(shown.pixels_HWC).permute(2, 0, 1)[None])
    with torch.no_grad():
        output = model(x_BCHW)
    assert shown.pixels_HWC.shape[:2] == info.size
    assert shown.answer.macs == count_macs(model, info.size, output.gates, output.exited)
    assert shown.answer.dense_macs == dense_macs(model, info.size)
    ran = [(g[0] != 0).tolist() for g in output.gates or ()]
    assert [list(layer.ran) for layer in shown.layers] == ran
    if kind == "segmentation":
        agreed = shown.answer.labels_HW == output.logits.argmax(dim=1)[0].numpy()
        assert agreed.mean() > 0.99  # two classes may be equal to the last digit
    else:
        probabilities = dict(zip(NAMES, output.logits[0].softmax(dim=0).tolist(), strict=True))
        assert len(shown.answer.top) == 3
        for name, probability in shown.answer.top:
            assert probabilities[name] == pytest.approx(probability, abs=1e-4)
    assert shown.answer.ms > 0 and (shown.dense_ms is None) == (kind in ("dense", "pruned"))
    assert (shown.expert is not None) == (kind == "experts")
    assert (demo.engine_note is not None) == (kind == "on the way")
    with_slider = ("gated", "exits", "codes", "segmentation")
    assert isinstance(demo.slider, Slider) == (kind in with_slider)
    card = answer_card(shown) + image_card(shown)
    assert "<img src=x" not in card and "\x1b" not in card


@pytest.mark.parametrize("kind", ["gated", "segmentation"])
def test_a_budget_is_kept_by_closing_the_smallest_gates(kind: str, image: Path) -> None:
    demo = Demo(make(kind))
    free = demo.show(image)
    share = free.answer.macs / free.answer.dense_macs
    middle = (demo.slider.low + share) / 2
    found = [demo.show(image, value) for value in (middle, demo.slider.low, demo.slider.high)]
    for shown, budget in zip(found, (middle, demo.slider.low), strict=False):
        assert shown.answer.macs <= budget * shown.answer.dense_macs < free.answer.macs
        for less, more in zip(shown.layers, free.layers, strict=True):
            assert all(more.ran[i] for i, ran in enumerate(less.ran) if ran)
    assert found[0].answer.macs > found[1].answer.macs
    assert found[2].layers == free.layers and found[2].answer.macs == free.answer.macs
    for wrong in (-1, 9.5, float("nan"), float("inf")):
        with pytest.raises(UserError, match="a budget is from"):
            demo.show(image, wrong)


@pytest.mark.parametrize("kind", ["exits", "codes"])
def test_the_embedding_answers_where_it_may(kind: str, image: Path) -> None:
    demo = Demo(make(kind))
    early, late = demo.show(image, 0.0), demo.show(image, 1.0)
    assert (early.answered_by, late.answered_by) == ("embedding", "network")
    assert early.answer.macs == demo.checkpoint.model.embedding.macs(8, 8) < late.answer.macs
    assert not any(any(layer.ran) for layer in early.layers)
    assert "early exit" in answer_card(early) and "base network" in answer_card(late)


def test_images_that_can_not_be_used_get_one_sentence(tmp_path: Path, image: Path) -> None:
    demo = Demo(make("gated"))
    Image.new("1", (10_000, 10_000)).save(tmp_path / "huge.png")
    (tmp_path / "eps.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (tmp_path / "cut.png").write_bytes(image.read_bytes()[:900])
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(200 * 2**20)
    for name, told in {
        "huge.png": "10000 x 10000 pixels: at most 67 million",
        "eps.png": "not an image",
        "cut.png": "truncated",
        "large.png": "bytes are more than",
        "none.png": "No such file",
        ".": "directory",
    }.items():
        with pytest.raises(UserError, match=told) as found:
            demo.show(tmp_path / name)
        assert str(tmp_path) not in str(found.value) and "\n" not in str(found.value)
    assert "&lt;b&gt;" in error_card("<b>") and "<b>" not in error_card("<b>")
    assert demo.show(image).answer.top


def test_images_are_at_hand_where_the_data_is_built_in(tmp_path: Path) -> None:
    checkpoint = make("gated")
    assert sample_images(checkpoint, tmp_path) == []  # another model's classes
    data = open_data(checkpoint.config.data, batch_size=16)
    samples = sample_images(replace(checkpoint, info=data.info), tmp_path)
    assert len(samples) == SAMPLES
    pixels = data.info.to_pixels(next(iter(data.evaluation))[0])[1].permute(1, 2, 0)
    assert np.array_equal(np.asarray(Image.open(samples[1])), pixels.numpy())


def test_the_command_tells_mistakes_in_one_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no model.safetensors").write_text("no model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, told in {
            (): "deepmoe quickstart first",
            ("no model.safetensors",): "not a safetensors file",
            ("missing.safetensors",): "no checkpoint",
            ("--port", "99999"): "99999",
            ("--port", port): f"port {port} can't be used",
        }.items():
            if port in arguments:
                monkeypatch.setattr(
                    "deepmoe.cli.demo.QUICKSTART", tmp_path / "no model.safetensors"
                )
                monkeypatch.setattr("deepmoe.checkpoint.load_checkpoint", lambda *_, **__: None)
            result = CliRunner().invoke(main, ["demo", "--no-browser", *arguments])
            assert result.exit_code == 2 and told in result.stderr, result.output
            assert len(result.stderr.splitlines()) == 1
