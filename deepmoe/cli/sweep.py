"""The verb `sweep`."""

import json
from pathlib import Path

import click

from deepmoe.cli.common import as_typed, json_option, set_option
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

SHOWN = {  # key: title
    "accuracy": "accuracy",
    "macs": "MACs",
    "macs_share": "of its own dense MACs",
    "embedding_accuracy": "embedding's accuracy",
    "seconds": "seconds",
}


@click.command(**example("deepmoe sweep grid.toml --jobs 2"))
@click.argument("grid", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for the runs. [default: runs/NAME]"
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="File for the results. [default: runs.jsonl next to GRID]",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Runs at once; with --ray, on each GPU. [default: as GRID says]",
)
@click.option("--only", help="Names of runs, with commas; * matches anything. [default: all]")
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="A Ray cluster to train on: HOST:PORT of its head, ray://HOST:PORT, or auto for the "
    "cluster of this machine. A run takes its threads (OMP_NUM_THREADS, or 2) and, unless "
    "train.device is cpu, its share of a GPU if there is one: half of one with --jobs 2. All "
    "machines must see the folder of the runs. [default: this machine]",
)
@set_option
@json_option
def sweep(
    grid: Path,
    out: Path | None,
    results: Path | None,
    jobs: int | None,
    only: str | None,
    ray: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train all runs of GRID, a .toml file, and compare them.

    Runs go to runs/NAME: NAME is that of the file, or of its folder if the file is called
    grid.toml.

    Finished runs are not repeated, and interrupted runs resume from their last checkpoint: run the
    command again to finish a sweep. --set applies to all runs. --only also trains the runs that
    the named ones need.
    """
    from deepmoe.sweep import RESULTS_NAME, grid_name, read_grid, read_results, summary
    from deepmoe.sweep import sweep as run_sweep

    asked, name = read_grid(grid, overrides), grid_name(grid)
    if only is not None:
        asked = asked.only(only.split(","))
    results = results or grid.parent / RESULTS_NAME
    shown = grid.name if grid.stem == name else f"{name}/{grid.name}"
    command = f"deepmoe sweep {shown}{as_typed(overrides)}"
    out = out or Path("runs", name)
    complete = run_sweep(asked, out, results, command=command, jobs=jobs, ray=ray)
    rows = summary([run.name for run in asked.runs], read_results(results))
    keys = [key for key in SHOWN if any(key in row for row in rows)]
    cells = [[_cell(row, key) for key in ("run", "seeds", *keys)] for row in rows]
    if as_json:
        say(json.dumps(rows, indent=2))
    else:
        print_table(["run", "seeds", *(SHOWN[key] for key in keys)], cells)
    if not complete:
        raise UserError("some runs have no result; their logs say why")


def _cell(row: dict[str, object], key: str) -> str:
    from deepmoe.costs import format_macs

    value, deviation = row.get(key), row.get(f"{key}_deviation")
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if key in ("accuracy", "embedding_accuracy", "macs_share"):
        spread = "" if not isinstance(deviation, float) else f" ± {100 * deviation:.2f}"
        return f"{value:.2%}{spread}"
    if key == "macs":
        return format_macs(value)
    return f"{value:.0f}"
