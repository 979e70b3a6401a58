"""All tables and figures at the smallest scale, from the command line to the files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from deepmoe.cli import main
from deepmoe.paper import PAGES
from deepmoe.paper.measured import fits
from deepmoe.sweep import RESULTS_NAME, read_results


def paper(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["paper", *map(str, arguments)])


def told(result: Result) -> str:
    """The one sentence that a mistake is told in."""
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    return line


# One test: what it makes takes most of a minute, and would be made anew in another process.
def test_all_names_at_the_smoke_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, smoke = tmp_path / "out", ("--scale", "smoke", "--out", tmp_path / "out")
    result = paper("all", *smoke)
    assert result.exit_code == 0, result.output
    assert "next: deepmoe paper all --scale short" in result.stdout
    check_files(out)
    check_figures(out)
    check_lost_checkpoint(out, smoke)
    results = read_results(out / RESULTS_NAME)
    before = (out / "table-cifar.md").read_text()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a finished run was repeated")

    monkeypatch.setattr("deepmoe.sweep.steps.fit", fail)
    again = paper("table-cifar", "table-memory", *smoke, "--json")
    assert again.exit_code == 0, again.output
    assert list(json.loads(again.stdout)) == ["table-cifar", "table-memory"]
    assert (out / "table-cifar.md").read_text() == before
    assert read_results(out / RESULTS_NAME).keys() == results.keys()
    check_refusals(out, smoke)


@pytest.mark.slow
def test_pages_are_made_as_soon_as_their_runs_have_ended(tmp_path: Path) -> None:
    """So what is stopped leaves those; --no-train makes pages of what is there."""
    smoke = ("figure-shuffle", "table-memory", "--scale", "smoke", "--out", tmp_path)
    assert "leave out --no-train" in told(paper(*smoke, "--no-train"))
    assert not list(tmp_path.iterdir())  # refused before any data is made up
    result = paper(*smoke, "--jobs", 2)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    codes = "cifar100-vgg16-codes-seed0"  # of table-memory alone
    assert lines.index("figure-shuffle, making: started") < lines.index(f"{codes}: done")
    before = (tmp_path / "figure-shuffle.md").read_text()
    (tmp_path / "figure-shuffle.md").unlink()
    assert paper("figure-shuffle", *smoke[2:], "--no-train").exit_code == 0
    assert (tmp_path / "figure-shuffle.md").read_text() == before
    # Where it was stopped before a page was made, that comes first.
    (tmp_path / "figure-shuffle.md").unlink()
    kept = (tmp_path / RESULTS_NAME).read_text().splitlines(keepends=True)
    (tmp_path / RESULTS_NAME).write_text("".join(line for line in kept if codes not in line))
    again = paper(*smoke, "--jobs", 2)
    assert again.exit_code == 0, again.output
    assert again.stderr.splitlines()[0] == "figure-shuffle, making: started"
    assert (tmp_path / "figure-shuffle.md").read_text() == before


def check_files(out: Path) -> None:
    for name, page in PAGES.items():
        written = json.loads((out / f"{name}.json").read_text())
        assert written["command"] == "deepmoe paper all --scale smoke" and written["hardware"]
        assert written["versions"]["torch"] and "commit" in written
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        text, values = (out / f"{name}.md").read_text(), written["values"]
        assert text.startswith(f"# {name}: {page.title}")
        assert values["rows"] and all(
            label in text for row in values["rows"] for label in row["labels"].values()
        )
        for table in values["tables"]:
            assert {len(cells) for cells in table["cells"]} == {len(table["header"])}, name
        finished = [row for row in values["rows"] if row["runs"]]
        assert all(row["seeds"] == len(row["runs"]) == 1 for row in finished)


def check_figures(out: Path) -> None:
    def rows(name: str) -> dict[str, dict]:
        values = json.loads((out / f"{name}.json").read_text())["values"]
        return {row["row"]: row for row in values["rows"]}

    wide = rows("table-cifar")["CIFAR-100, resnet110, wide DeepMoE, ours"]
    assert wide["paper"] == {"error": 26.14}
    assert wide["difference"]["error"] == pytest.approx(wide["error"] - 26.14)
    assert (
        rows("table-pruned-resnet50")["He"]["top5"] <= rows("table-pruned-resnet50")["He"]["error"]
    )
    memory = rows("table-memory")
    masked, narrowed = (memory[f"DeepMoE, ours, {part}"] for part in ("masked", "narrowed"))
    assert narrowed["parameters"] < masked["parameters"]
    assert narrowed["file_bytes"] < masked["file_bytes"]
    assert rows("figure-expressive")["vgg16, DeepMoE, ours"]["distinct"] >= 1
    assert "out_of_group" in rows("figure-shuffle")["literal, all classes"]
    scenes = (out / "table-cityscapes.md").read_text()
    assert "| class | DRN-A-50, dense |" in scenes and "| background |" in scenes


def check_other_figures(out: Path, smoke: tuple[object, ...]) -> None:
    """Figures that are JSON, but not what was measured: each part of each page is looked at."""
    run = out / "runs" / "cifar100-vgg16-literal-seed0"
    for name in ("figure-expressive", "figure-shuffle", "table-memory"):
        path = run / f"{name}.json"
        before = json.loads(path.read_text())
        measured, like = before["figures"], PAGES[name].measures
        assert fits(measured, like)
        for key in measured:
            for wrong in ("a word", None, [1], {"a": 1}, float("nan"), {"own": "x"}, True, 10**400):
                assert not fits({**measured, key: wrong}, like)
        assert not fits({**measured, "labels": 5}, like)  # which a row has of its own
        path.write_text(json.dumps({"figures": {**measured, key: wrong}}))
        assert f"{path} is damaged: remove it" in told(paper(name, *smoke))
        path.write_text(json.dumps(before))
    lines = (out / RESULTS_NAME).read_text()
    for key, wrong in (
        ("dense_macs", 0),
        ("dense_macs", -1),
        ("dense_macs", float("inf")),
        ("macs", float("nan")),
        ("macs", True),
        ("iou", [1]),
        ("iou", {"road": 7.0}),
        ("active", None),
        ("active", "abc"),
        ("accuracy", 7.5),
    ):
        changed = [json.loads(line) for line in lines.splitlines()]
        for line in changed:
            if line["values"]["run"] == run.name:  # which no other starts from
                line["values"]["last"][key] = wrong
        (out / RESULTS_NAME).write_text("".join(f"{json.dumps(line)}\n" for line in changed))
        assert "lacks figures" in told(paper("table-memory", *smoke))
    (out / RESULTS_NAME).write_text(lines)


def check_other_data(out: Path, smoke: tuple[object, ...]) -> None:
    """Runs of one table have seen the same classes; made-up data is called so, nothing else."""
    fewer = out.parent / "fewer"
    shutil.copytree(out / "data" / "imagenet", fewer)
    for split in ("train", "val"):
        shutil.rmtree(sorted((fewer / split).iterdir())[-1])
    other = told(paper("table-imagenet-wide", *smoke, "--set", f"data.root={fewer}"))
    assert "was trained on other images than those in" in other and "give another --out" in other
    same = shutil.copytree(out / "data" / "imagenet", out.parent / "same")
    own = paper("table-imagenet-wide", *smoke, "--set", f"data.root={same}", "--json")
    (values,) = json.loads(own.stdout).values()
    assert values["shortened"].startswith("thin networks")


def check_fewer_images(out: Path, smoke: tuple[object, ...]) -> None:
    """Of the same classes: nothing but their number tells them from those of the other runs."""
    fewer = shutil.copytree(out / "data" / "imagenet", out.parent / "fewer_images")
    next((fewer / "val").glob("*/*")).unlink()
    other = told(paper("table-pruned-resnet50", *smoke, "--set", f"data.root={fewer}"))
    assert "was trained on other images than those in" in other and "give another --out" in other


def check_lost_checkpoint(out: Path, smoke: tuple[object, ...]) -> None:
    """What the command says to do does train the run again."""
    (out / "runs" / "cifar100-vgg16-literal-seed0" / "last.safetensors").unlink()
    before = json.loads((out / "table-memory.json").read_text())["values"]["rows"]
    assert "is gone though the run's result is there" in told(paper("table-memory", *smoke))
    lines = (out / RESULTS_NAME).read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"run": "cifar100-vgg16-literal-seed0"' not in line]
    assert len(kept) == len(lines) - 1
    (out / RESULTS_NAME).write_text("".join(kept))
    assert paper("table-memory", *smoke).exit_code == 0
    after = json.loads((out / "table-memory.json").read_text())["values"]["rows"]
    assert [row["error"] for row in after] == [row["error"] for row in before]


def check_refusals(out: Path, smoke: tuple[object, ...]) -> None:
    """What another call makes of settings that changed, and of files that were damaged."""
    epochs = paper("table-memory", *smoke, "--set", "train.epochs=2")
    assert "was trained with other settings: give another --out" in told(epochs)
    if not torch.cuda.is_available():
        gpu = paper("table-memory", *smoke, "--set", "train.device=cuda")
        assert "no usable CUDA device" in told(gpu)
    # How fast it runs is no such setting.
    assert paper("table-memory", *smoke, "--set", "data.workers=1").exit_code == 0
    check_other_data(out, smoke)
    check_fewer_images(out, smoke)
    # Made-up data that is gone in part is made again, and is the same.
    shutil.rmtree(out / "data" / "cifar10")
    assert paper("table-cifar", *smoke).exit_code == 0
    run = out / "runs" / "cifar100-vgg16-dense-seed0"
    (run / "table-memory.json").write_text('{"dense": ')
    assert "table-memory.json is damaged" in told(paper("table-memory", *smoke))
    (run / "table-memory.json").unlink()
    check_other_figures(out, smoke)
    (run / "last.safetensors").unlink()
    assert "is gone though" in told(paper("table-memory", *smoke))
    # A page that can't be made does not stop the others.
    both = paper("table-memory", "figure-rnp", *smoke, "--no-train")
    assert "table-memory: " in told(both) and "figure-rnp: error against MACs" in both.stdout
    lines = (out / RESULTS_NAME).read_text()
    # A table of nothing does not take the place of one that was made before.
    table = out / "table-cityscapes.md"
    before = table.read_text()
    kept = [line for line in lines.splitlines(keepends=True) if '"cityscapes-' not in line]
    (out / RESULTS_NAME).write_text("".join(kept))
    nothing = told(paper("table-cityscapes", "figure-rnp", *smoke, "--no-train"))
    assert "table-cityscapes: none of its runs has a result" in nothing
    assert table.read_text() == before
    (out / RESULTS_NAME).write_text(lines[:-100])
    assert "is not the result of a sweep's run" in told(paper("figure-rnp", *smoke))
