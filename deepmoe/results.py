"""Measured figures as JSON, each with what is needed to judge and repeat it."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import deepmoe
from deepmoe.files import write_atomically

START = b'{\n  "command": '  # of a file of results


def write_result(
    path: str | Path, values: Any, *, command: str, seed: int, device: torch.device | str
) -> None:
    """Writes figures with what they come from."""
    result = with_origin(values, command=command, seed=seed, device=device)
    write_atomically(Path(path), (json.dumps(result, indent=2) + "\n").encode())


def with_origin(
    values: Any, *, command: str, seed: int, device: torch.device | str
) -> dict[str, Any]:
    """Figures with the command, hardware, versions, seed and commit they come from."""
    return {"command": command, "seed": seed, **origin(device), "values": values}


def origin(device: torch.device | str) -> dict[str, Any]:
    """Hardware, versions and commit, as they are here."""
    return {
        "hardware": hardware(device),
        "versions": {
            "python": platform.python_version(),
            "deepmoe": deepmoe.__version__,
            "torch": torch.__version__,
        },
        "commit": _git("rev-parse", "HEAD"),
        # Of the package alone: figures depend on nothing else here.
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", ".")),
    }


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows under a header, as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def hardware(device: torch.device | str) -> str:
    """The name of the device: a GPU's, or the processor's with its number of cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*arguments: str) -> str | None:
    """What git says of the checkout that the package runs from, if it does."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
