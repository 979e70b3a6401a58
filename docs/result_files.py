"""Results as the documents read them."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def read_result(name: str) -> dict[str, Any]:
    """The result of this name."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def origin(*results: dict[str, Any]) -> str:
    """Where results of one command are from."""
    one = results[0]
    seeds, commits = (
        ", ".join(sorted({str(result[key])[:7] for result in results}))
        for key in ("seed", "commit")
    )
    parts = [
        one["hardware"],
        f"torch {one['versions']['torch']}",
        f"seed {seeds}",
        f"commit {commits}",
        *([f"`{one['command']}`"] if one["command"].startswith("deepmoe") else []),
        *([one["note"]] if "note" in one else []),
    ]
    return f"({'; '.join(parts)})"
