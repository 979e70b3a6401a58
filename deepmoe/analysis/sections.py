"""What a page tells of a model, part by part: sentences, plots, tables, pictures."""

import numpy as np

from deepmoe.analysis import plots
from deepmoe.analysis.contenders import Contender, comparison
from deepmoe.analysis.gate_sections import (
    class_shuffling_section,
    experts_section,
    layers_section,
    memory_section,
    routes_section,
    shuffling_section,
)
from deepmoe.analysis.section import Section, Subject, Table
from deepmoe.costs import format_macs
from deepmoe.evaluation import SegmentationEvaluation
from deepmoe.evaluation.findings import Findings

MOST_ROWS = 24  # of a table that is not folded away


def headline(found: Findings, subject: Subject) -> str:
    """The result in a sentence."""
    result = found.evaluation
    images = f"{result.images:,} {subject.data} images ({found.evaluated_on})"
    if isinstance(result, SegmentationEvaluation):
        said = f"{subject.name} reaches a mean IoU of {result.accuracy:.1%} on {images}"
    else:
        said = f"{subject.name} recognises {result.accuracy:.1%} of {images}"
    macs = format_macs(result.macs)
    if result.macs == result.dense_macs:
        return f"{said} at {macs} MACs an image."
    dense = format_macs(result.dense_macs)
    return f"{said} at {result.macs_share:.0%} of the dense network's MACs: {macs} of {dense}."


def beside_sentence(found: Findings, subject: Subject) -> str | None:
    """How it stands to the first of the other networks; `None` if there are none."""
    if not subject.beside:
        return None
    other = subject.beside[0]
    points = 100 * (found.evaluation.accuracy - other.result.accuracy)
    share = other.result.macs and found.evaluation.macs / other.result.macs
    how = f"{abs(points):.1f} points {'more' if points > 0 else 'less'} accurate than"
    if abs(points) < 0.05:
        how = "as accurate as"
    return f"It is {how} {other.name}, at {share:.0%} of its MACs."


def tiles(found: Findings) -> list[tuple[str, str]]:
    """The figures that count, each with what it is."""
    result = found.evaluation
    shown = [
        (f"{result.accuracy:.1%}", result.measure),
        (f"{result.macs_share:.0%}", "of the dense MACs"),
        (format_macs(result.macs), "MACs an image"),
    ]
    if found.exits is not None:
        shown.append((f"{found.exits.answered / found.exits.images:.0%}", "answered early"))
    if found.routes is not None:
        shown.append((f"{result.active:.0%}", "of the gated channels run"))
        shown.append((f"{found.routes.distinct:,}", "different routes"))
    return shown


def all_sections(found: Findings, subject: Subject, *, deep: bool = False) -> list[Section]:
    """What was found out, in the order of a reader.

    Args:
        found: of the model.
        subject: what it is.
        deep: whether to tell of every layer, too.
    """
    made = [
        _accuracy(found, subject),
        _costs(found),
        _pictures(found),
        _classes_of_pixels(found),
        _exits(found),
        routes_section(found),
        experts_section(found),
        layers_section(found) if deep else None,
        shuffling_section(found),
        class_shuffling_section(found),
        memory_section(found),
        _training(subject),
    ]
    return [section for section in made if section is not None]


def _accuracy(found: Findings, subject: Subject) -> Section | None:
    own = Contender(subject.name, found.evaluation)
    everyone = (own, *subject.beside)
    table = Table(*comparison(everyone)) if subject.beside else None
    if not found.curve and table is None:
        return None
    points = {c.name: (c.result.macs_share, c.result.accuracy) for c in everyone}
    curves, text = {}, []
    if found.curve:
        ways = {"gates": "small gates closed", "exits": "more images answered early"}
        line = [point.result.as_dict() for point in found.curve]
        curves[ways[found.curve_by or "gates"]] = line
        told = "more and more small gates are closed"
        if found.curve_by == "exits":
            told = "the embedding answers more and more images"
        text.append(f"The line is the same checkpoint where {told}, without any training.")
    figure = plots.cost_curve_plot(curves, points, found.evaluation.measure)
    figures = {"accuracy_against_macs": (figure, "Accuracy against MACs")}
    return Section("Accuracy against cost", text, figures, table=table)


def _classes_of_pixels(found: Findings) -> Section | None:
    result = found.evaluation
    if not isinstance(result, SegmentationEvaluation):
        return None
    rows = [(name, "-" if iou != iou else f"{iou:.1%}") for name, iou in result.iou.items()]
    return Section(
        "Classes",
        [f"{result.pixel_accuracy:.1%} of the pixels get the right class."],
        table=Table(("class", "IoU"), rows),
        folded=len(rows) > MOST_ROWS,
    )


def _costs(found: Findings) -> Section | None:
    macs = found.record.macs
    low, high = int(macs.min()), int(macs.max())
    if low == high:
        return None
    text = [
        f"From {format_macs(low)} to {format_macs(high)}; half of the images cost less than "
        f"{format_macs(float(np.median(macs)))}."
    ]
    figure = plots.macs_histogram(found.record)
    return Section("MACs per image", text, {"macs_per_image": (figure, "MACs per image")})


def _pictures(found: Findings) -> Section:
    few = "" if found.record.labels is None else ", a few of each class"
    groups = {f"The cheapest{few}": found.cheapest, f"The dearest{few}": found.dearest}
    same = bool(len(found.record)) and found.record.macs.min() == found.record.macs.max()
    text = []
    if found.routes is not None and not same:
        text = ["Small bars: share of the channels that ran, layer by layer."]
    if same:
        return Section("Some images", ["All of them cost the same."], pictures={"": found.cheapest})
    return Section("The cheapest and dearest images", text, pictures=groups)


def _exits(found: Findings) -> Section | None:
    exits = found.exits
    if exits is None:
        return None
    rest = exits.images - exits.answered
    rows = []
    for told, count, accuracy in (
        ("answered by the embedding", exits.answered, exits.accuracy_answered),
        ("went on to the base network", rest, exits.accuracy_rest),
    ):
        shown = "-" if accuracy is None else f"{accuracy:.1%}"
        rows.append((told, f"{count:,}", f"{count / exits.images:.1%}", shown))
    text = [
        f"Where the embedding is sure of the class (a confidence of {exits.threshold:.3f} or "
        "more), its answer stands, and the base network never runs."
    ]
    if exits.vote:
        text.append(
            f"On other images it has a vote of {exits.vote:.0%}: both answers are averaged."
        )
    return Section("Exits", text, table=Table(("", "images", "share", "accuracy"), rows))


def _training(subject: Subject) -> Section | None:
    runs = {subject.name: subject.metrics} | {c.name: c.metrics for c in subject.beside}
    known = {name: metrics for name, metrics in runs.items() if plots.can_be_drawn(metrics)}
    if subject.name not in known:
        return None
    figures = {"training": (plots.loss_curves(known), "Loss and accuracy by epoch")}
    return Section("Training", (), figures, folded=True)
