"""Data that users bring: parts of ImageNet and CamVid, where they are."""

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepmoe.cli import main

SHARED = Path(__file__).parents[3] / "shared" / "data"
IMAGENETTE = SHARED / "imagenette" / "imagenette-mini.zip"
CAMVID = SHARED / "camvid" / "camvid-480x360.zip"


def some_of(archive: Path, root: Path, folders: int, each: dict[str, int]) -> Path:
    """A few files of each folder of an archive, as many as is said for its split."""
    counts: dict[str, int] = {}
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            *_, folder = parents = name.split("/")[:-1]
            split = next((part for part in parents if part in each), None)
            where = "/".join(parents)
            if name.endswith("/") or split is None or counts.get(where, 0) >= each[split]:
                continue
            if where not in counts and sum(split in w for w in counts) >= folders:
                continue
            counts[where] = counts.get(where, 0) + 1
            files.extract(name, root)
        for name in files.namelist():
            if name.endswith("classes.txt"):
                files.extract(name, root)
    assert counts, folder
    return root


def rows_of(name: str, root: Path, out: Path, *more: str) -> dict[str, dict]:
    options = ["--scale", "smoke", "--set", f"data.root={root}", "--out", str(out), "--json"]
    result = CliRunner().invoke(main, ["paper", name, *options, *more])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)[name]
    command = json.loads((out / f"{name}.json").read_text())["command"]
    assert str(root) not in command
    return {row["row"]: row for row in values["rows"]}


@pytest.mark.skipif(not IMAGENETTE.exists(), reason="no Imagenette here")
def test_a_part_of_imagenet(tmp_path: Path) -> None:
    root = some_of(IMAGENETTE, tmp_path / "imagenette", 20, {"train": 5, "val": 2})
    rows = rows_of("table-pruned-resnet50", root, tmp_path / "out")
    assert rows["narrow DeepMoE, ours"]["paper"]["error"] == 26.2
    assert all(0 <= row["top5"] <= row["error"] <= 100 for row in rows.values())


@pytest.mark.skipif(not CAMVID.exists(), reason="no CamVid here")
def test_camvid(tmp_path: Path) -> None:
    root = some_of(CAMVID, tmp_path / "camvid", 2, {"train": 6, "test": 2})
    rows = rows_of("table-cityscapes", root, tmp_path / "out")
    assert len(rows) == 6 and all(0 <= row["accuracy"] <= 100 for row in rows.values())
    assert (tmp_path / "out" / "table-cityscapes.png").stat().st_size > 10_000
