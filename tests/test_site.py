"""The documents are a site without warnings: no dead links, no page that nothing leads to."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-j", "2"]
    folders = ["-d", str(tmp_path / "doctrees"), "-c", str(ROOT / "docs"), str(ROOT)]
    built = subprocess.run([*command, *folders, str(tmp_path / "site")], capture_output=True)
    assert built.returncode == 0, built.stderr.decode()
    assert "docs/index.html" in (tmp_path / "site" / "index.html").read_text()
    assert "train.target_macs" in (tmp_path / "site/docs/configuration.html").read_text()
