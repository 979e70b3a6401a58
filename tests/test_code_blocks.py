"""Code in the documents runs; commands are parsed, since they need data that is not here."""

import re
import shlex
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from helpers import tiny_config
from test_docs import ROOT, examples, run
from torch import nn

import deepmoe
from deepmoe.cli import main
from deepmoe.config import RunConfig, load_config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "py", "sh", "toml", "text", "{toctree}"}
RUN_IN = {  # pages whose code a test of their own runs
    "test_docs.py": {"README.md", "gate_your_own_network.md", "extending.md", "analyze.md"},
    "test_docs.py, once more": {"deploy.md"},
    "test_tutorial.py": {"tutorial.md"},
    "here": {"exits.md", "compare.md", "sparse-engine.md", "networks.md"},
}
MOST_COLUMNS, MOST_CHARACTERS = 9, 60
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Languages and texts of a page's blocks."""
    return re.findall(r"^```(\S*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@each_page
def test_blocks_say_what_they_are(page: Path) -> None:
    languages = {language for language, _ in blocks(page)}
    assert languages <= LANGUAGES
    if "python" in languages:
        assert any(page.name in pages for pages in RUN_IN.values()), "no test runs its code"
    for language, text in blocks(page):
        if language == "py":
            compile(text, page.name, "exec")


@each_page
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    for language, text in blocks(page):
        if language == "sh":
            for line in re.findall(r"^deepmoe .+", text, re.MULTILINE):
                parsed(re.sub(r"\[[^\]]*\]| \.\.\.", "", line))


def parsed(line: str) -> None:
    """Parses a command as the command line would; files need not be there."""
    command: Any = main
    words = shlex.split(line, comments=True)[1:]
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is not main, line
    try:
        command.make_context(line, words)
    except click.BadParameter as error:
        assert "does not exist" in error.message, f"{line}: {error.message}"


@each_page
def test_settings_that_are_shown_exist(page: Path, tmp_path: Path) -> None:
    for language, text in blocks(page):
        if language == "toml":
            values = tomllib.loads(text)
            if "preset" not in values:  # a configuration, not a grid
                path = tmp_path / "shown.toml"
                path.write_text(text)
                assert isinstance(load_config(path), RunConfig)


@each_page
def test_tables_can_be_read(page: Path) -> None:
    for line in re.findall(r"^\| .+ \|$", page.read_text(), re.MULTILINE):
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        assert len(cells) <= MOST_COLUMNS, line
        assert len(re.sub(r"\]\([^)]*\)", "]", cells[0]).strip()) <= MOST_CHARACTERS, cells[0]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert text.index("```python") < text.index("\n| ")  # your network before our tables


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", ["sparse-engine.md", "networks.md"])
def test_pages_that_need_nothing_run(page: str, capsys) -> None:
    made = run(page, examples(f"docs/{page}"), {})
    assert made["output"].logits.isfinite().all()


@pytest.mark.usefixtures("one_thread")
def test_the_page_on_exits_runs() -> None:
    model = deepmoe.create_model("vgg11", classes=3, widths=[64] * 8, gates=None, exits=True)
    images, labels = torch.randn(40, 3, 32, 32), torch.arange(40) % 3
    model.embedding.project.weight.data.mul_(20)  # some confident, some not
    with torch.no_grad():
        labels = model.eval()(images).embedding_logits.argmax(1)
    given = {"torch": torch, "model": model, "held_out_batches": [(images, labels)]}
    made = run("exits.md", examples("docs/exits.md"), {**given, "image": images[:1]})
    assert model.exit_at is not None and made["sparse"](images).logits.shape == (40, 3)


@pytest.mark.usefixtures("one_thread")
def test_the_page_on_comparisons_runs() -> None:
    start = deepmoe.fit(tiny_config("model.gates=none", "train.finetune_epochs=0"), "start")
    Path(start.checkpoint).rename("dense.safetensors")
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
    )
    images = torch.randn(16, 3, 8, 8)
    given = {"network": network, "images": images, "train_loader": [(images, torch.arange(16) % 2)]}
    made = run("compare.md", examples("docs/compare.md"), given)
    assert type(made["small"]) is nn.Sequential and made["small"][0].out_channels < 8
    assert all(Path(path).exists() for path in made["found"].checkpoints.values())


def test_the_factory_of_the_page_on_training_gives_a_trained_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (factory,) = examples("docs/training.md", "py")
    mycode = types.ModuleType("mycode")
    mycode.MyNet = lambda classes: nn.Conv2d(3, classes, 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mycode", mycode)
    monkeypatch.chdir(tmp_path)
    trained = mycode.MyNet(3)
    torch.save(trained.state_dict(), "mynet.pth")
    made = run("docs/training.md", [factory], {})["make"]()
    assert torch.equal(made.weight, trained.weight)
