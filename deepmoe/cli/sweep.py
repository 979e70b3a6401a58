"""The verb `sweep`."""

import json
from pathlib import Path

import click

from deepmoe.cli.common import as_typed, json_option, set_option
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

SHOWN = {  # key: title
    "accuracy": "accuracy",
    "macs": "MACs",
    "macs_share": "of its own dense MACs",
    "embedding_accuracy": "embedding's accuracy",
    "seconds": "seconds",
}


@click.command()
@click.argument("grid", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the runs. [runs/GRID]")
@click.option(
    "--results", type=click.Path(path_type=Path), help="Folder of the figures. [results/GRID]"
)
@click.option("--jobs", type=click.IntRange(1), help="Runs side by side. [default: as GRID says]")
@set_option
@json_option
def sweep(
    grid: Path,
    out: Path | None,
    results: Path | None,
    jobs: int | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train all runs of GRID, a .toml file, several side by side, and compare them.

    Runs that have a result already are left alone, and those that were interrupted go on from
    their last checkpoint: call it again to finish a sweep. What is --set holds for all runs.
    """
    from deepmoe.files import write_atomically
    from deepmoe.results import markdown_table
    from deepmoe.sweep import read_grid, summary
    from deepmoe.sweep import sweep as run_sweep

    runs = read_grid(grid, overrides)
    folder = results or Path("results") / grid.stem
    out = out or Path("runs") / grid.stem
    command = f"deepmoe sweep {grid.name}{as_typed(overrides)}"
    complete = run_sweep(runs, out, folder, command=command, jobs=jobs)
    rows = summary(runs, folder)
    shown = [key for key in SHOWN if any(key in row for row in rows)]
    cells = [[_cell(row, key) for key in ("run", "seeds", *shown)] for row in rows]
    header = ["run", "seeds", *(SHOWN[key] for key in shown)]
    write_atomically(folder / "table.md", f"{markdown_table(header, cells)}\n".encode())
    if as_json:
        say(json.dumps(rows, indent=2))
    else:
        print_table(header, cells)
    if not complete:
        raise UserError("some runs have no result; their logs tell why")


def _cell(row: dict[str, object], key: str) -> str:
    value, deviation = row.get(key), row.get(f"{key}_deviation")
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if deviation is None else f"{value:.4g} ± {deviation:.2g}"
