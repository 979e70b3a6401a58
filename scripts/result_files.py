"""Results as the documents read them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def read_result(name: str) -> dict[str, Any]:
    """The result of this name."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def origin(*results: dict[str, Any]) -> str:
    """Where results are from."""

    def all_of(figures: Iterable[str]) -> str:
        return ", ".join(sorted(set(figures)))

    parts = [
        all_of(result["hardware"] for result in results),
        f"torch {all_of(result['versions']['torch'] for result in results)}",
        f"seed {all_of(str(result['seed']) for result in results)}",
        f"commit {all_of(result['commit'][:7] for result in results)}",
        all_of(f"`{r['command']}`" for r in results if r["command"].startswith("deepmoe")),
        all_of(result["note"] for result in results if "note" in result),
    ]
    return f"({'; '.join(part for part in parts if part)})"
