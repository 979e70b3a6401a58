"""The verb `compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepmoe.cli.common import as_typed, json_option, network_option, parse_numbers, set_option
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.comparison import Comparison

ALL, LIST = "all", "list"
TABLE_NAME, PLOT_NAME = "table.json", "table.png"


@click.command()
@click.argument("method")
@click.option(
    "--start", type=click.Path(path_type=Path), help="Checkpoint of the trained, dense network."
)
@click.option("--preset", help="Or how to train it first: a preset, or a .toml file.")
@click.option("--model", help="What the network is called, to make sure that --start is one.")
@click.option("--macs", default="0.5", show_default=True, help="Shares of the dense MACs.")
@click.option(
    "--setting", help="Of li: a network of the paper, such as vgg16-a, instead of --macs."
)
@click.option("--seeds", default="0", show_default=True, help="Of the runs, with commas.")
@click.option(
    "--published", is_flag=True, help="Also retrain as each method's authors do, as a second row."
)
@click.option(
    "--teacher",
    "teachers",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Checkpoint to learn from; can be given many times.",
)
@click.option("--teacher-preset", help="Or how to train teachers first, one a seed.")
@click.option("--methods", help="Of all: these only, with commas.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Runs at once.")
@click.option("--ray", metavar="ADDRESS", help="Train on this Ray cluster, not here.")
@click.option(
    "--latency-images",
    default=200,
    show_default=True,
    type=click.IntRange(0),
    help="Test images to time on the CPU, one at a time; 0 for none.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder. [runs/compare_MODEL]")
@set_option
@network_option
@json_option
def compare(method: str, **options: object) -> None:
    """Compare METHOD with others at one cost, or all of them in one table.

    METHOD is a name (deepmoe compare list shows them), or all. Every method starts from the same
    trained network, comes down to the same share of its MACs, and is retrained as the start was
    trained, unless --set says otherwise. Accuracy is that of the last epoch, on the test set.

    What is finished is not repeated: call it again to go on.
    """
    if method == LIST:
        _print_methods()
        return
    _compare(method, **options)  # type: ignore[arg-type]


def _compare(
    method: str,
    start: Path | None,
    preset: str | None,
    model: str | None,
    macs: str,
    setting: str | None,
    seeds: str,
    published: bool,
    teachers: tuple[Path, ...],
    teacher_preset: str | None,
    methods: str | None,
    jobs: int,
    ray: str | None,
    latency_images: int,
    out: Path | None,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
) -> None:
    from deepmoe.compare import METHODS, method_named
    from deepmoe.comparison import open_comparison, run_comparison

    if method != ALL and methods is not None:
        raise UserError("--methods goes with compare all")
    chosen = METHODS if method == ALL else (method_named(method),)
    if methods is not None:
        chosen = tuple(method_named(name) for name in methods.split(","))
    asked = open_comparison(
        chosen,
        shares=parse_numbers("--macs", macs, float),
        start=start,
        preset=preset,
        seeds=parse_numbers("--seeds", seeds, int),
        setting=setting,
        published=published,
        teachers=teachers,
        teacher_preset=teacher_preset,
        overrides=overrides,
        network=network,
    )
    name = asked.base.model.name
    if model not in (None, name):
        raise UserError(f"the network is {name}, not {model}")
    folder = out or Path("runs", f"compare_{name.replace(':', '_').replace('/', '_')}")
    command = _typed(method, preset, macs, seeds, setting, published, teacher_preset, overrides)
    found = run_comparison(
        asked, folder, command=command, jobs=jobs, ray=ray, latency_images=latency_images
    )
    _write(found, folder, command, asked.seeds[0])
    _print(found, folder, as_json)


def _typed(
    method: str,
    preset: str | None,
    macs: str,
    seeds: str,
    setting: str | None,
    published: bool,
    teacher_preset: str | None,
    overrides: tuple[str, ...],
) -> str:
    """The command, but for places on this machine."""
    begin = "--start CHECKPOINT" if preset is None else f"--preset {Path(preset).name}"
    cost = f"--macs {macs}" if setting is None else f"--setting {setting}"
    taught = "" if teacher_preset is None else f" --teacher-preset {Path(teacher_preset).name}"
    more = f"{' --published' * published}{taught}{as_typed(overrides)}"
    return f"deepmoe compare {method} {begin} {cost} --seeds {seeds}{more}"


def _write(found: "Comparison", folder: Path, command: str, seed: int) -> None:
    """Table and plot, beside the runs."""
    import io

    from deepmoe.analysis.plots import comparison_plot
    from deepmoe.devices import choose_device
    from deepmoe.files import write_atomically
    from deepmoe.results import write_result

    if not found.table:
        return
    write_result(
        folder / TABLE_NAME,
        found.table,
        command=command,
        seed=seed,
        device=choose_device("auto"),
    )
    drawn = io.BytesIO()
    comparison_plot(found.table).savefig(drawn, format="png", dpi=150)
    write_atomically(folder / PLOT_NAME, drawn.getvalue())


def _print(found: "Comparison", folder: Path, as_json: bool) -> None:
    from deepmoe.comparison.table import HEADER, table_cells

    if as_json:
        say(json.dumps(found.table, indent=2))
    else:
        print_table(HEADER, table_cells(found.table))
        if len(found.checkpoints) == 1:
            checkpoint = next(iter(found.checkpoints.values()))
            say(f"checkpoint: {checkpoint}")
            say(f"next: deepmoe predict {checkpoint} IMAGE")
        else:
            say(f"table: {folder / TABLE_NAME}; plot: {folder / PLOT_NAME}")
    if not found.complete:
        raise UserError("some runs have no result; their logs tell why")


def _print_methods() -> None:
    from deepmoe.compare import METHODS

    rows = [
        (m.name, m.title, m.source, "each image" if m.dynamic else "all images") for m in METHODS
    ]
    print_table(("name", "method", "published by", "chooses for"), rows)
