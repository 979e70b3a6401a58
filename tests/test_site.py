"""The documents are a site without warnings: no dead links, no page that nothing leads to."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT

import deepmoe


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-j", "2"]
    folders = ["-d", str(tmp_path / "doctrees"), "-c", str(ROOT / "docs"), str(ROOT)]
    built = subprocess.run([*command, *folders, str(tmp_path / "site")], capture_output=True)
    assert built.returncode == 0, built.stderr.decode()
    assert "docs/index.html" in (tmp_path / "site" / "index.html").read_text()
    assert "train.target_macs" in (tmp_path / "site/docs/configuration.html").read_text()


def test_files_of_the_project_agree_with_the_package() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == deepmoe.__version__
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run") for step in workflow["jobs"]["check"]["steps"]]
    assert ".ci/run" in commands and (ROOT / ".ci" / "run").exists()
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        if path.name != "config.yml":
            fields = {field["id"]: field for field in yaml.safe_load(path.read_text())["body"]}
            assert "deepmoe --version" in fields["version"]["attributes"]["label"]
            assert fields["version"]["validations"]["required"] and "config" in fields
