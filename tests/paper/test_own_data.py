"""Data that users bring: parts of ImageNet and of CamVid, where these are."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from deepmoe.cli import main

SHARED = Path(__file__).parents[3] / "shared" / "data"
IMAGENETTE = SHARED / "imagenette" / "imagenette-mini.zip"
CAMVID = SHARED / "camvid" / "camvid-480x360.zip"


def some_of(archive: Path, root: Path, each: dict[str, int], shrink: int = 1) -> Path:
    """The first files of each folder of an archive, as many as is said for its split."""
    taken: dict[Path, int] = {}
    with zipfile.ZipFile(archive) as files:
        for name in sorted(files.namelist()):
            path = root / name
            most = next((count for split, count in each.items() if split in path.parts), 0)
            if name.endswith("/") or taken.get(path.parent, 0) >= most:
                continue
            taken[path.parent] = taken.get(path.parent, 0) + 1
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(io.BytesIO(files.read(name)))
            size = (image.width // shrink, image.height // shrink)
            image.resize(size, Image.Resampling.NEAREST).save(path)
    assert taken
    return root


def rows_of(name: str, root: Path, out: Path) -> dict[str, dict]:
    options = ["--scale", "smoke", "--set", f"data.root={root}", "--out", str(out), "--json"]
    result = CliRunner().invoke(main, ["paper", name, *options])
    assert result.exit_code == 0, result.output
    assert str(root) not in json.loads((out / f"{name}.json").read_text())["command"]
    return {row["row"]: row for row in json.loads(result.stdout)[name]["rows"]}


@pytest.mark.skipif(not IMAGENETTE.exists(), reason="needs ../shared/data")
def test_a_part_of_imagenet(tmp_path: Path) -> None:
    root = some_of(IMAGENETTE, tmp_path / "imagenette", {"train": 3, "val": 1})
    rows = rows_of("table-pruned-resnet50", root, tmp_path / "out")
    assert rows["narrow DeepMoE, ours"]["paper"]["error"] == 26.2
    assert all(0 <= row["top5"] <= row["error"] <= 100 for row in rows.values())


@pytest.mark.skipif(not CAMVID.exists(), reason="needs ../shared/data")
def test_camvid(tmp_path: Path) -> None:
    root = some_of(CAMVID, tmp_path / "camvid", {"train": 4, "test": 2}, shrink=8)
    (root / "classes.txt").write_text("\n".join(f"class {i}" for i in range(11)))
    rows = rows_of("table-cityscapes", root, tmp_path / "out")
    assert len(rows) == 7 and all(0 <= row["accuracy"] <= 100 for row in rows.values())
    assert (tmp_path / "out" / "table-cityscapes.png").stat().st_size > 10_000
