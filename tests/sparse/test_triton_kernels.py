"""The GPU kernels, in Triton's interpreter on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_equal_plain_indexing() -> None:
    pytest.importorskip("triton")
    # A process of its own: Triton decides at import whether it interprets.
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "equal", done.stderr
