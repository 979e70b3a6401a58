"""The verbs that show what a checkpoint does: to others (report), and in depth (analyze)."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.checkpoints import Opened, open_checkpoint
from deepmoe.cli.common import as_typed, data_option, json_option, network_option
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.analysis import Contender, Subject
    from deepmoe.evaluation.findings import Asked, Findings

images_option = click.option(
    "--images",
    type=click.IntRange(min=1),
    help="Use this many images, evenly spread over the data. [default: all]",
)


@click.command(**example("deepmoe report runs/quickstart/deepmoe/last.safetensors"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The .html file to write. [default: report.html next to CHECKPOINT]",
)
@click.option(
    "--beside",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Another checkpoint to compare with, such as the dense twin's. Can be repeated.",
)
@images_option
@data_option
@network_option
@json_option
def report(
    checkpoint: Path,
    out: Path | None,
    beside: tuple[Path, ...],
    images: int | None,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
) -> None:
    """Write a report about CHECKPOINT: one HTML file, to share.

    Shows accuracy against MACs, MACs per image, the cheapest and most expensive images with what
    ran for them, and routes by class. The file needs nothing else. More detail: deepmoe analyze.
    """
    from deepmoe.analysis import write_report
    from deepmoe.analysis.report import check_page
    from deepmoe.evaluation.findings import Asked

    path = out or checkpoint.parent / "report.html"
    check_page(path)
    found, subject, _ = _examined(checkpoint, overrides, network, Asked(images=images), beside)
    write_report(path, found, subject)
    if as_json:
        say(json.dumps(found.as_dict() | {"report": str(path)}, indent=2))
        return
    _tell(found, subject)
    say(f"report: {path}")
    say(f"in depth: {_command('analyze', checkpoint, overrides, network)}")


@click.command(**example("deepmoe analyze runs/quickstart/deepmoe/last.safetensors"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to write to. [default: analysis, next to CHECKPOINT]",
)
@click.option(
    "--shuffle",
    type=click.IntRange(min=0),
    help="Number of images to run under the gates of other classes, spread evenly over the "
    "classes; 0 for none. [default: 1000]",
)
@click.option(
    "--draws",
    type=click.IntRange(min=1, max=1_000_000),
    default=20,
    show_default=True,
    help="Runs of each of those images, each under other gates.",
)
@click.option("--class", "of_class", metavar="NAME", help="Also shuffle this class on its own.")
@images_option
@data_option
@network_option
@json_option
def analyze(
    checkpoint: Path,
    out: Path | None,
    shuffle: int | None,
    draws: int,
    of_class: str | None,
    images: int | None,
    overrides: tuple[str, ...],
    network: str | None,
    as_json: bool,
) -> None:
    """Analyze CHECKPOINT in depth: layers, routes, memory.

    Writes a folder with an HTML page, its plots and pictures as PNG, and all figures as JSON. The
    page is the one that deepmoe report writes, with more sections.
    """
    from deepmoe.analysis import write_analysis
    from deepmoe.analysis.report import PAGE_NAME, check_folder
    from deepmoe.evaluation.findings import SHUFFLED, Asked
    from deepmoe.results import with_origin

    folder = out or checkpoint.parent / "analysis"
    check_folder(folder)
    asked = Asked(
        images=images,
        shuffled=SHUFFLED if shuffle is None else shuffle,
        draws=draws,
        of_class=of_class,
        memory=True,
    )
    found, subject, opened = _examined(checkpoint, overrides, network, asked)
    settings = {k: v for k, v in dataclasses.asdict(asked).items() if k != "memory"}
    options = {"shuffle": shuffle, "draws": draws, "class": of_class, "images": images}
    options["network"] = network
    words = [word for k, v in options.items() if v is not None for word in (f"--{k}", str(v))]
    given = f" {shlex.join(words)}"
    values = with_origin(
        {"checkpoint": checkpoint.name, "asked": settings, **found.as_dict()},
        command=f"deepmoe analyze {checkpoint.name}{as_typed(overrides)}{given}",
        seed=asked.seed,
        device=opened.device,
    )
    files = write_analysis(folder, found, subject, values)
    if as_json:
        say(json.dumps(values, indent=2))
        return
    _tell(found, subject)
    _tell_memory(found)
    for note in found.notes:
        say(note)
    say(f"analysis: {folder / PAGE_NAME}, and {len(files) - 1} other files")
    say(f"to share: {_command('report', checkpoint, overrides, network)}")


def _command(verb: str, checkpoint: Path, overrides: tuple[str, ...], network: str | None) -> str:
    """Another verb for the same checkpoint, as it is to be typed."""
    settings = [word for item in overrides for word in ("--set", item)]
    made_by = [] if network is None else ["--network", network]
    return shlex.join(["deepmoe", verb, str(checkpoint), *settings, *made_by])


def _examined(
    checkpoint: Path,
    overrides: tuple[str, ...],
    network: str | None,
    asked: "Asked",
    beside: tuple[Path, ...] = (),
) -> "tuple[Findings, Subject, Opened]":
    """What there is to find out about a checkpoint, and what it is."""
    from deepmoe.analysis import Subject
    from deepmoe.analysis.names import readable_data
    from deepmoe.evaluation.findings import examine
    from deepmoe.training.log import METRICS_NAME, read_metrics

    others = [(path, open_checkpoint(path, overrides, network)) for path in beside]
    opened = open_checkpoint(checkpoint, overrides, network)
    loaded, data = opened.checkpoint, opened.data
    for path, other in others:
        if other.data.info.class_names != data.info.class_names:
            raise UserError(f"{path} was trained on other classes, so it can't be compared")
    with opened.autocast():
        found = examine(loaded.model, data, asked)
    subject = Subject(
        name=loaded.config.model.name,
        data=readable_data(opened.data_config),
        checkpoint=checkpoint.name,
        config=loaded.config,
        metrics=read_metrics(checkpoint.parent / METRICS_NAME),
        beside=tuple(
            _contender(name, other, asked.images)
            for name, (_, other) in zip(_names(beside), others, strict=True)
        ),
    )
    return found, subject, opened


def _names(paths: tuple[Path, ...]) -> list[str]:
    """What checkpoints are called: by their run, or their file; in full where two are alike."""
    from deepmoe.checkpoint import BEST_NAME, LAST_NAME

    short = [p.parent.name if p.name in (BEST_NAME, LAST_NAME) else p.stem for p in paths]
    return [
        name if short.count(name) == 1 else str(p) for name, p in zip(short, paths, strict=True)
    ]


def _contender(name: str, opened: Opened, images: int | None) -> "Contender":
    from deepmoe.analysis import Contender
    from deepmoe.evaluation import evaluate_on
    from deepmoe.evaluation.batches import EvenlySpread

    data: Any = opened.data.evaluation
    batches = data if images is None else EvenlySpread(data, images)
    with opened.autocast():
        result = evaluate_on(opened.checkpoint.model, opened.data.info, batches)
    return Contender(f"{opened.checkpoint.config.model.name} ({name})", result)


def _tell(found: "Findings", subject: "Subject") -> None:
    from deepmoe.analysis.gate_sections import route_sentence, shuffling_sentence
    from deepmoe.analysis.sections import beside_sentence, headline

    say(headline(found, subject))
    beside = beside_sentence(found, subject)
    if beside is not None:
        say(beside)
    if found.exits is not None:
        say(f"The embedding answers {found.exits.answered / found.exits.images:.0%} of the images.")
    if found.routes is not None:
        say(route_sentence(found))
    if found.shuffling is not None:
        say(shuffling_sentence(found))


def _tell_memory(found: "Findings") -> None:
    from deepmoe.analysis.names import file_size

    assert found.memory is not None
    rows = []
    for v in found.memory.variants:
        sizes = (v.weight_bytes, v.file_bytes, v.peak_bytes)
        rows.append((v.name, f"{v.parameters:,}", *map(file_size, sizes)))
    print_table(("kept", "parameters", "weights", "file", "peak"), rows)
