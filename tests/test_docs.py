"""The documents say what the code does."""

import dataclasses
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import third_party
import torch
from torch import nn

import deepmoe
from deepmoe import registry
from deepmoe.cli import main
from deepmoe.config import RunConfig
from deepmoe.description import gated_share
from deepmoe.paper import PAGES
from deepmoe.paper.page import Row
from deepmoe.paper.tables import line_of
from deepmoe.results import write_result

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from config_reference import config_keys  # noqa: E402
from result_files import benchmark  # noqa: E402
from scale_tables import BETWEEN, MEASURED, gradient_seconds, plan_table, step_milliseconds  # noqa: E402
from update_docs import DOCUMENTS, PARTS, PLOTS, as_svg, filled  # noqa: E402

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def test_generated_tables_are_up_to_date() -> None:
    texts = [path.read_text() for path in DOCUMENTS]
    assert all(any(f"<!-- {name} -->" in text for text in texts) for name in PARTS)
    assert any("| `vgg16` | 32x32 | 100 | 12 | 14.77 M |" in text for text in texts)
    assert [filled(text) for text in texts] == texts, "run `make docs`"
    assert filled("<!-- models -->\n<!-- /models -->") == filled(
        "<!-- models -->\nold\n<!-- /models -->"
    )


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_plots_are_up_to_date(path: Path) -> None:
    described = re.compile("<dc:description>(.+)</dc:description>")
    svgs = path.read_text(), as_svg(PLOTS[path])
    committed, now = (described.search(svg)[1] for svg in svgs)
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


def test_a_table_of_the_paper_is_shown_once_it_was_made(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paper_tables.EXPERIMENTS", tmp_path)
    part = "<!-- paper-results -->\n<!-- /paper-results -->"
    assert "Not made yet: no result of the 11" in filled(part) and "###" not in filled(part)
    line = line_of(Row({"method": "RNP"}, ("a",)), [{"error": 30.0, "macs": 1e8, "share": 32.0}])
    values = {"scale": "short", "tables": [{}], "shortened": "38 epochs", "rows": [line]}
    command = "deepmoe paper figure-rnp"
    path = tmp_path / "paper" / "figure-rnp.json"
    write_result(path, values, command=command, seed=0, device="cpu")
    assert "| RNP | 30.00 % | 100.00 M | 32.00 % |" in filled(part)
    assert "Shortened: 38 epochs." in filled(part)
    assert f"`{command}`" in filled(part) and PAGES["figure-rnp"].notes[0] in filled(part)
    assert filled(part).count("###") == 1 and "Not made yet: `table-cifar`, " in filled(part)


def test_make_docs_brings_a_table_up_to_date(tmp_path: Path) -> None:
    for folder in ("benchmarks", "docs", "experiments", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    document, plot = tmp_path / "docs" / "exits.md", tmp_path / "docs" / "exits.svg"
    good = document.read_text()
    document.write_text(good.replace("| 70.94%", "| 71.94%"))
    plot.write_text("")
    assert document.read_text() != good
    command = [sys.executable, str(tmp_path / "scripts" / "update_docs.py"), str(document)]
    subprocess.run(command, check=True)
    assert document.read_text() == good and plot.stat().st_size


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


def examples(document: str, language: str = "python") -> list[str]:
    """Code of a document: `python` is run as it is, `py` needs something that stands elsewhere."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(document: str, code: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """Runs code, one piece after the other in one scope; returns what it has defined."""
    for piece in code:
        exec(compile(piece, document, "exec"), names)
    return names


@pytest.mark.usefixtures("one_thread")
def test_the_six_lines_of_the_readme_print_what_they_show(capsys) -> None:
    """On what the README says: digits, and a network of three convolutions."""
    given = run("digits", examples("docs/gate_your_own_network.md")[:1], {})
    own = {"network": given["mynet"](), "images": given["images"][:2]}
    own |= {"train_dataset": given["train"], "validation_dataset": given["validation"]}
    capsys.readouterr()
    (code,), (shown,) = examples("README.md"), examples("README.md", "text")
    made = run("README.md", [code], own)
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.split("%", 1)[1] == shown.strip().split("%", 1)[1]  # MACs, to the percent
    assert abs(int(printed.split("%")[0]) - int(shown.split("%")[0])) <= 3
    assert made["sparse"](given["images"][:4]).logits.shape == (4, 10)


@pytest.mark.usefixtures("one_thread")
def test_gate_your_own_network_runs_as_it_is_written() -> None:
    page = "docs/gate_your_own_network.md"
    assert len((ROOT / page).read_text().splitlines()) <= 110  # two screens
    made = run(page, examples(page), {})
    assert deepmoe.check(made["model"], made["images"][:2]).passed
    shares = made["shares"]
    assert shares[0] > shares[1] + 0.1 > shares[2] + 0.1  # MACs fall from the first epochs on
    assert shares[-1] == pytest.approx(0.5, abs=0.02)
    assert made["result"].evaluation.macs_share == pytest.approx(0.5, abs=0.02)
    assert made["result"].evaluation.accuracy > 0.8
    assert made["wide"].gating.widths == tuple(2 * w for w in made["model"].gating.widths)
    with torch.no_grad():
        outputs = [m.eval()(made["images"][:8]).logits for m in (made["model"], made["wide"])]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    assert sorted(path.name for path in Path().iterdir()) == ["mine", "runs"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.* stays ungated")
def test_gate_your_own_network_is_right_about_networks_of_others() -> None:
    page, timm = "docs/gate_your_own_network.md", third_party.timm()
    (named,) = examples(page, "py")
    names = {"deepmoe": deepmoe, "timm": timm, "images": torch.randn(1, 3, 64, 64)}
    run(page, [named.replace("pretrained=True", "pretrained=False")], names)

    network = timm.create_model("convnext_tiny", num_classes=10)
    gating = deepmoe.gate(network, torch.randn(1, 3, 64, 64), where="all").gating
    groups = [gating.graph.groups[number] for number in gating.gated]
    layers = {path for group in groups for path in (*group.makers, *group.readers)}
    assert not any(isinstance(network.get_submodule(path), nn.Conv2d) for path in layers)
    share = f"{100 * gated_share(gating, 64):.0f} % of all MACs"
    told = f"gates cover 0 % of the MACs of its convolutions, but {share}"
    assert told in (ROOT / page).read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_deployment_runs_as_it_is_written(capsys) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    made = run("docs/deploy.md", examples("docs/deploy.md"), {})
    assert str(made["result"]) in capsys.readouterr().out
    assert made["result"].parameters < 0.8 * made["result"].dense_parameters
    assert len(made["labels"]) == 4 and set(made["labels"]) <= set("0123456789")


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zoo to add to."""
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))


@pytest.mark.usefixtures("zoo")
def test_a_network_for_the_zoo_is_added_as_it_is_written() -> None:
    made = run("docs/extending.md", examples("docs/extending.md"), {})
    assert registry.model_entry("mynet").options == ["wide"]
    assert made["model"].gating.widths == (64,)
    assert deepmoe.check(made["model"], torch.randn(2, 3, 32, 32)).passed


@pytest.mark.usefixtures("one_thread")
def test_what_the_page_on_analysis_shows_runs(capsys) -> None:
    page = "docs/analyze.md"
    assert len((ROOT / page).read_text().splitlines()) <= 110  # two screens
    model = deepmoe.create_model("resnet20", classes=3, widths=[4] * 9)
    batches = [(torch.randn(6, 3, 8, 8), torch.arange(6) % 3)]
    made = run(page, examples(page), {"model": model, "batches": batches, "class_names": "abc"})
    assert made["routes"].distinct == 1  # its gates are all open
    assert made["shuffling"].total.own == made["shuffling"].total.shuffled
    assert capsys.readouterr().out


def test_every_configuration_key_is_described() -> None:
    rows = [
        row
        for table in dataclasses.fields(RunConfig)
        for row in config_keys(table.name, table.type)
    ]
    assert len(rows) == sum(len(dataclasses.fields(t.type)) for t in dataclasses.fields(RunConfig))
    assert all(len(description) > 5 for *_, description in rows)
    by_key = {row[0]: row[1:] for row in rows}
    assert by_key["`train.batch_size`"][:3] == ("int", "`128`", "2 to 10,000,000")
    assert by_key["`train.prune`"][:3] == ("float", "unset", "above 0, up to 1")
    assert by_key["`train.teacher`"][0] == "path or list of paths"


def test_a_plan_for_many_machines_follows_from_one_gpu() -> None:
    weights = 1_000_000
    assert gradient_seconds(weights, 1, 1) == 0
    summed = 2 * 63 / 64 * 4 * weights / BETWEEN  # a ring sends nearly all of it twice
    assert gradient_seconds(weights, 8, 8) == pytest.approx(summed)
    table = plan_table()
    for title, file in MEASURED.items():
        step = step_milliseconds(benchmark(file)["values"], "joint")
        assert f"| {title} | 1 x 1 | {step:.1f} | 0.0 |" in table
