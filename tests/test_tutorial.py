"""The tutorial, from start to end, as it is written."""

import shlex
from pathlib import Path

import pytest
import third_party
from test_code_blocks import blocks
from test_docs import ROOT, run

from deepmoe.cli import main

QUICK = {"resnet18": "resnet10t", "size = 64": "size = 32", "epochs = 8": "epochs = 2"}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
def test_a_folder_becomes_a_gated_timed_and_exported_network(capsys) -> None:
    for name in ("jinja2", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    third_party.timm()
    printed = {}
    for language, code in blocks(ROOT / "docs" / "tutorial.md"):
        for long, short in QUICK.items():
            code = code.replace(long, short)
        if language == "python":
            run("tutorial.md", [code], {})
        elif language == "toml":
            Path("mine.toml").write_text(code)
        for line in code.splitlines() if language == "sh" else ():
            if line.startswith("deepmoe"):
                words = shlex.split(line)
                main(words[1:], standalone_mode=False)
                printed[words[1]] = capsys.readouterr().out
    assert "gated" in printed["describe"]
    assert "% of dense" in printed["eval"]
    assert "plum" in printed["predict"]
    assert "ms" in printed["bench"]
    assert Path("exits.safetensors").stat().st_size and Path("mine.onnx").stat().st_size
    assert "<html" in Path("runs/mine/report.html").read_text()
