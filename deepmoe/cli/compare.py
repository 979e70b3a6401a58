"""The verb `compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.common import (
    as_typed,
    json_option,
    network_option,
    next_command,
    parse_numbers,
    set_option,
)
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.comparison import Comparison

ALL, LIST = "all", "list"
MEASURE = "measure-run"  # what `compare` calls in processes of its own


@click.command(**example("deepmoe compare li taylor --start dense.safetensors --macs 0.5"))
@click.argument("names", metavar="METHOD...", nargs=-1, required=True)
@click.option(
    "--start", type=click.Path(path_type=Path), help="Checkpoint of a trained dense network."
)
@click.option("--preset", help="Or a preset or .toml file to train it with first.")
@click.option("--model", help="Stop if the network is not this one.")
@click.option("--macs", help="Share of the dense MACs to keep, several with commas. [default: 0.5]")
@click.option(
    "--setting", help="For li: a network of its paper, such as vgg16-a, in place of --macs."
)
@click.option("--seeds", default="0", show_default=True, help="Seeds, with commas.")
@click.option(
    "--published",
    is_flag=True,
    help="Also retrain as the authors do, where that is known: li, li-greedy and slimming.",
)
@click.option(
    "--teacher",
    "teachers",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Checkpoint to distill from, can be repeated; or one file written by `deepmoe teach`.",
)
@click.option("--teacher-preset", help="Or a preset to train teachers with first, one per seed.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Runs at once.")
@click.option("--ray", metavar="ADDRESS", help="Train on this Ray cluster instead.")
@click.option(
    "--latency-images",
    default=200,
    show_default=True,
    type=click.IntRange(0),
    help="Test images to time on the CPU, one at a time; 0 for none.",
)
@click.option("--no-train", is_flag=True, help="Train nothing; print the table of finished runs.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder. [default: runs/compare_MODEL]"
)
@set_option
@network_option
@json_option
def compare(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare METHODs at the same cost, in one table.

    METHOD is a name, or all; "deepmoe compare list" lists the names. Every method starts from the
    same trained network, keeps the same share of its MACs, and is retrained as that network was
    trained, unless --set says otherwise. Accuracy is that of the last epoch, on the test set.

    Finished runs are not repeated: run the command again to continue.
    """
    if names == (LIST,):
        _print_methods(as_json)
        return
    _compare(names, as_json=as_json, **options)


@click.command(MEASURE, hidden=True)
@click.argument("run")
def measure_run(run: str) -> None:
    """Measure a finished run of a comparison, which `compare` describes."""
    from deepmoe.comparison.measuring import measure_from

    measure_from(run)


def _compare(
    names: tuple[str, ...],
    *,
    as_json: bool,
    macs: str | None,
    seeds: str,
    model: str | None,
    out: Path | None,
    jobs: int,
    ray: str | None,
    latency_images: int,
    no_train: bool,
    **options: Any,
) -> None:
    from deepmoe.compare import METHODS, method_named
    from deepmoe.comparison import open_comparison, run_comparison

    if macs is not None and options["setting"] is not None:
        raise UserError("--setting already says how many channels stay: leave out --macs")
    macs = "0.5" if macs is None else macs
    if len(names) > 1 and not {ALL, LIST}.isdisjoint(names):
        raise UserError(f"give {ALL} or {LIST} alone, without other methods")
    chosen = METHODS if names == (ALL,) else tuple(map(method_named, dict.fromkeys(names)))
    asked = open_comparison(
        chosen,
        shares=parse_numbers("--macs", macs, float),
        seeds=parse_numbers("--seeds", seeds, int),
        **options,
    )
    name = asked.base.model.name
    if model not in (None, name):
        raise UserError(f"the network is {name}, not {model}")
    folder = out or Path("runs", f"compare_{name.replace(':', '_').replace('/', '_')}")
    command = _typed(names, macs, seeds, **options)
    found = run_comparison(
        asked,
        folder,
        command=command,
        jobs=jobs,
        ray=ray,
        latency_images=latency_images,
        train=not no_train,
        quiet=as_json,
    )
    table = folder / f"{ALL if names == (ALL,) else '_'.join(m.name for m in chosen)}.json"
    _write(found, table, command, asked.seeds[0])
    _print(found, table, name, as_json)


def _typed(
    names: tuple[str, ...],
    macs: str,
    seeds: str,
    *,
    preset: str | None,
    setting: str | None,
    published: bool,
    teachers: tuple[Path, ...],
    teacher_preset: str | None,
    overrides: tuple[str, ...],
    **_: Any,
) -> str:
    """The command, but for places on this machine."""
    parts = [
        "--start CHECKPOINT" if preset is None else f"--preset {Path(preset).name}",
        f"--macs {macs}" if setting is None else f"--setting {setting}",
        f"--seeds {seeds}",
        *["--published"] * published,
        *["--teacher CHECKPOINT"] * len(teachers),
        *([] if teacher_preset is None else [f"--teacher-preset {Path(teacher_preset).name}"]),
    ]
    return f"deepmoe compare {' '.join((*names, *parts))}{as_typed(overrides)}"


def _write(found: "Comparison", table: Path, command: str, seed: int) -> None:
    """Table and plot, beside the runs."""
    import io

    from deepmoe.analysis.plots import comparison_plot
    from deepmoe.devices import choose_device
    from deepmoe.files import write_atomically
    from deepmoe.results import write_result

    if not found.table:
        return
    device = choose_device("auto")
    write_result(table, found.table, command=command, seed=seed, device=device)
    drawn = io.BytesIO()
    comparison_plot(found.table).savefig(drawn, format="png", dpi=150)
    write_atomically(table.with_suffix(".png"), drawn.getvalue())


def _print(found: "Comparison", table: Path, network: str, as_json: bool) -> None:
    from deepmoe.comparison.table import HEADER, table_cells
    from deepmoe.sources import is_source

    if as_json:
        say(json.dumps(found.table, indent=2))
    else:
        print_table(HEADER, table_cells(found.table))
        for name, checkpoint in found.checkpoints.items():
            say(f"{name}: {checkpoint}")
        say(f"table: {table}; plot: {table.with_suffix('.png')}")
        if found.checkpoints:
            first = next(iter(found.checkpoints.values()))
            next_command(
                "deepmoe predict", first, network if is_source(network) else None, "IMAGES"
            )
    if not found.complete:
        raise UserError("some rows have no result: see above, and the runs' logs")


def _print_methods(as_json: bool) -> None:
    from deepmoe.compare import METHODS

    header = ("name", "method", "published by", "chooses channels for")
    rows = [
        (m.name, m.title, m.source, "each image" if m.dynamic else "all images") for m in METHODS
    ]
    if as_json:
        say(json.dumps([dict(zip(header, row, strict=True)) for row in rows], indent=2))
    else:
        print_table(header, rows)
