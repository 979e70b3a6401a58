"""Fills the generated parts of README.md: tables from the code and from results/*.json.

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`. Run by `make docs`; a test
fails while a part is out of date.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepmoe.costs import format_macs, zoo_costs

ROOT = Path(__file__).parents[1]


def models_table() -> str:
    """The zoo at its usual input, with its usual classes."""
    rows = [
        (
            f"`{m['model']}`",
            m["input"],
            m["classes"],
            m["gates"],
            f"{m['params'] / 1e6:.2f} M",
            format_macs(m["macs"]),
            f"{m['embedding_macs'] / m['macs']:.1%}",
            ", ".join(m["options"]),
        )
        for m in zoo_costs()
    ]
    header = ["model", "input", "classes", "gates", "parameters", "MACs", "embedding", "options"]
    return _markdown(header, rows)


def quickstart_table() -> str:
    """What `make quickstart` measured."""
    result = _read_result("quickstart")
    rows = [
        (
            name,
            f"{v['accuracy']:.2%}",
            format_macs(v["macs"]),
            f"{v['macs_share']:.1%}",
            f"{v['active']:.1%}",
        )
        for name, v in result["values"].items()
    ]
    header = ["network", "accuracy", "mean MACs", "of dense MACs", "active channels"]
    source = (
        f"`{result['command']}`, seed {result['seed']}, {result['hardware']}, "
        f"torch {result['versions']['torch']}"
    )
    return f"{_markdown(header, rows)}\n\n({source})"


PARTS: dict[str, Callable[[], str]] = {"models": models_table, "quickstart": quickstart_table}


def filled(text: str) -> str:
    """The text with every generated part brought up to date."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", flags=re.DOTALL)
        if pattern.search(text):
            content = make()
            text = pattern.sub(lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text)
    return text


def _read_result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    for path in [ROOT / "README.md"]:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
