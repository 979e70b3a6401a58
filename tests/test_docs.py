"""The documents say what the code does."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepmoe.cli import main
from deepmoe.results import write_result

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from update_docs import COSTS, DOCUMENTS, PARTS, costs_as_svg, filled  # noqa: E402

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def test_generated_tables_are_up_to_date() -> None:
    texts = [path.read_text() for path in DOCUMENTS]
    assert all(any(f"<!-- {name} -->" in text for text in texts) for name in PARTS)
    assert "| `vgg16` | 32x32 | 100 | 12 | 14.77 M |" in texts[0]
    assert [filled(text) for text in texts] == texts, "run `make docs`"
    assert filled("<!-- models -->\n<!-- /models -->") == filled(
        "<!-- models -->\nold\n<!-- /models -->"
    )


def test_the_plot_is_up_to_date() -> None:
    described = re.compile("<dc:description>(.+)</dc:description>")
    committed, now = (described.search(svg)[1] for svg in (COSTS.read_text(), costs_as_svg()))
    assert "%" in now and committed == now, "run `make docs`"


def test_measurements_to_come_say_nothing_until_they_are_there(tmp_path: Path, monkeypatch) -> None:
    for module in ("result_files", "benchmark_tables"):
        monkeypatch.setattr(f"{module}.BENCHMARKS", tmp_path)
    empty = (
        "<!-- cpu-kernels -->\n\n<!-- /cpu-kernels -->\n<!-- resume-gpu -->\n\n<!-- /resume-gpu -->"
    )
    assert filled(empty) == empty
    kernels = [{"network": "vgg16", "density": 0.5, "median_ms": {"all ways": 1.5, "none": 3.0}}]
    write_result(tmp_path / "cpu_kernels.json", kernels, command="a", seed=0, device="cpu")
    resumed = {"vgg16": {"same weights": "yes"}}
    write_result(tmp_path / "resume_gpu.json", resumed, command="b", seed=0, device="cpu")
    assert "| vgg16 | 0.50 | 1.50 | 3.00 |" in filled(empty)
    assert "| case | same weights |" in filled(empty) and "| vgg16 | yes |" in filled(empty)


def test_make_docs_brings_a_table_up_to_date(tmp_path: Path) -> None:
    for folder in ("benchmarks", "docs", "experiments", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    readme = (ROOT / "README.md").read_text()
    stale = readme.replace("| `vgg16` |", "| `vgg17` |")
    assert stale != readme
    (tmp_path / "README.md").write_text(stale)
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "scripts" / "update_docs.py")], check=True)
    assert (tmp_path / "README.md").read_text() == readme


def anchors_of(document: Path) -> set[str]:
    """What a link can name in a document, as GitHub writes its headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


@each_document
def test_names_of_code_exist(document: Path) -> None:
    for dotted in re.findall(r"`(deepmoe(?:\.\w+)+)`", document.read_text()):
        module, parts = dotted, []
        while True:
            try:
                found = importlib.import_module(module)
                break
            except ModuleNotFoundError:
                module, _, last = module.rpartition(".")
                parts.insert(0, last)
        for part in parts:
            found = getattr(found, part)


@each_document
def test_commands_exist(document: Path) -> None:
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", document.read_text(), flags=re.DOTALL)
    for verb in re.findall(r"(?:`|^)deepmoe (\w+)", text, flags=re.MULTILINE):
        assert verb in main.commands, verb


@pytest.mark.parametrize("folder", ["benchmarks", "experiments"])
def test_indexes_name_everything(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text()
    kept = [*(ROOT / folder).glob("*.json"), *(ROOT / folder).glob("*/README.md")]
    assert kept
    for path in kept:
        assert str(path.relative_to(ROOT / folder)) in index


def test_the_layout_is_that_of_the_imports() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    told = re.findall(
        r"^\| `deepmoe\.(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert ["__main__", *reversed(told)] == contract["layers"]


def test_the_python_example_of_the_readme_runs(capsys) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example.count("\n") <= 15
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out
