"""The verb `sweep`."""

import json
from pathlib import Path

import click

from deepmoe.cli.common import json_option, print_table
from deepmoe.errors import UserError

SHOWN = ("accuracy", "macs_share", "macs", "embedding_accuracy", "seconds")


@click.command()
@click.argument("grid", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the runs. [runs/GRID]")
@click.option(
    "--results", type=click.Path(path_type=Path), help="Folder of the figures. [results/GRID]"
)
@click.option("--jobs", type=click.IntRange(1), help="Runs side by side. [default: as GRID says]")
@json_option
def sweep(
    grid: Path, out: Path | None, results: Path | None, jobs: int | None, as_json: bool
) -> None:
    """Train all runs of GRID, a .toml file, several side by side, and compare them.

    Runs that have a result already are left alone, and those that were interrupted go on from
    their last checkpoint: call it again to finish a sweep.
    """
    from deepmoe.files import write_atomically
    from deepmoe.results import markdown_table
    from deepmoe.sweep import read_grid, summary
    from deepmoe.sweep import sweep as run_sweep

    runs = read_grid(grid)
    folder = results or Path("results") / grid.stem
    out = out or Path("runs") / grid.stem
    complete = run_sweep(runs, out, folder, command=f"deepmoe sweep {grid.name}", jobs=jobs)
    rows = summary(runs, folder)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        shown = [key for key in SHOWN if any(key in row for row in rows)]
        cells = [[_cell(row, key) for key in ("run", "seeds", *shown)] for row in rows]
        header = ["run", "seeds", *shown]
        print_table(header, cells)
        table = markdown_table(header, cells) + "\n"
        write_atomically(folder / "table.md", table.encode())
    if not complete:
        raise UserError("some runs have no result; their logs tell why")


def _cell(row: dict[str, object], key: str) -> str:
    value, deviation = row.get(key), row.get(f"{key}_deviation")
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.4g}" if deviation is None else f"{value:.4g} ± {deviation:.2g}"
