import base64
import re

from click.testing import CliRunner
from helpers import TINY_RUN

from deepmoe.cli import main


def test_quickstart_prints_a_table_and_writes_a_self_contained_report(tmp_path) -> None:
    out = tmp_path / "quick"
    arguments = ["quickstart", "--out", str(out), *(a for s in TINY_RUN for a in ("--set", s))]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    for word in ("accuracy", "mean MACs", "active channels", "dense", "deepmoe", "100.0%"):
        assert word in result.output
    page = (out / "report.html").read_text()
    plots = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    for plot in plots:
        assert b"<svg" in base64.b64decode(plot)
    assert all(name in page for name in ("Accuracy against MACs", "Gate heat map", "by epoch"))
    assert "recognises" in page and "than dense, at" in page
    for outside in ("http://", "https://", "<script", "<link"):
        assert outside not in page
    # A second call starts anew; --resume of a finished pair trains nothing.
    again = CliRunner().invoke(main, [*arguments, "--resume"])
    assert again.exit_code == 0
    assert "epoch" not in again.output
