"""What a page tells of a model, part by part: sentences, plots, tables, pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deepmoe.analysis import gate_plots, plots
from deepmoe.analysis.contenders import Contender, comparison
from deepmoe.analysis.names import file_size, readable_layers
from deepmoe.config import RunConfig
from deepmoe.costs import format_macs
from deepmoe.evaluation import SegmentationEvaluation
from deepmoe.evaluation.findings import Findings
from deepmoe.evaluation.pictures import Picture

MOST_ROWS = 12  # of a table that is not folded away


@dataclass(frozen=True)
class Subject:
    """The model that a page is about.

    Attributes:
        name: of the network.
        data: that it was evaluated on.
        checkpoint: its file's name.
        config: of the run that trained it.
        metrics: of that run, a line an epoch; none if they are not there.
        beside: other networks, on the same images.
    """

    name: str
    data: str
    checkpoint: str
    config: RunConfig
    metrics: Sequence[dict[str, Any]] = ()
    beside: tuple[Contender, ...] = ()


@dataclass(frozen=True)
class Table:
    """Rows under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Attributes:
        title: its heading.
        text: sentences, a paragraph each.
        figures: by file name; each is drawn with its description.
        pictures: groups of images, by heading.
        table: `None` for none.
        folded: whether the table is shown on a click only.
    """

    title: str
    text: Sequence[str] = ()
    figures: dict[str, tuple[Figure, str]] = field(default_factory=dict)
    pictures: dict[str, tuple[Picture, ...]] = field(default_factory=dict)
    table: Table | None = None
    folded: bool = False


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
        _routes(found),
        _experts(found),
        _layers(found) if deep else None,
        _shuffling(found),
        _class_shuffling(found),
        _memory(found),
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
        folded=len(rows) > 2 * MOST_ROWS,
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
    return Section("Exits", text, table=Table(("", "images", "share", "accuracy"), rows))


def _routes(found: Findings) -> Section | None:
    routes = found.routes
    if routes is None:
        return None
    text = [route_sentence(found)]
    alike = routes.joined
    if alike.within is not None and alike.between is not None:
        text.append(
            f"Two images of one class switch {alike.within:.1%} of the gated channels alike, two "
            f"images of different classes {alike.between:.1%}."
        )
    title = "Gate heat map by layer, and by class where images have one"
    figures = {"gates_by_class": (gate_plots.gate_heatmap(found.record), title)}
    if routes.distinct > 1:
        figures["routes"] = (gate_plots.repeats_plot(routes), "How many images take each route")
    table = None
    if routes.classes:
        header = ("class", "images", "routes", "take the commonest", "active channels")
        rows = [
            (
                c.name,
                f"{c.images:,}",
                f"{c.distinct:,}",
                f"{c.commonest / c.images:.0%}",
                f"{c.active:.1%}",
            )
            for c in routes.classes
        ]
        table = Table(header, rows)
    folded = table is not None and len(table.rows) > MOST_ROWS
    title = "Routes by class" if routes.classes else "Routes"
    return Section(title, text, figures, table=table, folded=folded)


def route_sentence(found: Findings) -> str:
    """How many routes there are, and how often they repeat."""
    routes = found.routes
    assert routes is not None
    if routes.distinct == 1:
        return f"All {routes.images:,} images take the same route: the same channels run for each."
    if routes.distinct == routes.images:
        return f"{routes.images:,} images take {routes.images:,} routes: each has one of its own."
    common = routes.counts[0]
    once = {0: "none is taken", 1: "one is taken"}.get(routes.alone, f"{routes.alone:,} are taken")
    return (
        f"{routes.images:,} images take {routes.distinct:,} routes. The commonest is that of "
        f"{common:,} images ({common / routes.images:.0%}); {once} only once."
    )


def _experts(found: Findings) -> Section | None:
    record = found.record
    if record.experts is None or record.labels is None:
        return None
    counts = np.bincount(record.experts)
    text = [
        f"Each image runs one of {len(counts)} experts; the busiest runs {counts.max():,} of "
        f"{len(record):,} images."
    ]
    figure = gate_plots.expert_heatmap(record)
    return Section("Experts by class", text, {"experts_by_class": (figure, "Experts by class")})


def _layers(found: Findings) -> Section | None:
    routes = found.routes
    if routes is None:
        return None
    header = ("layer", "channels", "for all images", "for none", "patterns", "rank")
    layers = (*routes.layers, routes.joined)
    names = (*readable_layers([layer.name for layer in routes.layers]), "all layers")
    rows = [
        (name, *(f"{n:,}" for n in (x.channels, x.always, x.never, x.distinct, x.rank)))
        for name, x in zip(names, layers, strict=True)
    ]
    text = ["Channels that run for all images, for some, and for none."]
    figures = {"layers": (gate_plots.layer_plot(routes), "Channels that run, layer by layer")}
    return Section("Layer by layer", text, figures, table=Table(header, rows), folded=True)


def _shuffling(found: Findings) -> Section | None:
    shuffling = found.shuffling
    if shuffling is None:
        return None
    total = shuffling.total
    text = [
        f"{total.images:,} images under the gates of others, {shuffling.draws} times each.",
        shuffling_sentence(found),
    ]
    figures = {
        "shuffling_by_class": (gate_plots.shuffling_plot(shuffling), "Accuracy by class"),
        "shuffling_by_pair": (gate_plots.shuffling_heatmap(shuffling), "Accuracy by pair"),
    }
    return Section("Gates of other classes", text, figures)


def shuffling_sentence(found: Findings) -> str:
    """What gates of other classes do to accuracy."""
    shuffling = found.shuffling
    assert shuffling is not None
    total = shuffling.total
    text = f"Under their own gates {_percent(total.own)} are recognised, under gates of other "
    if shuffling.groups is None:
        return text + f"classes {_percent(total.shuffled)}."
    return text + (
        f"classes of the same category {_percent(total.in_group)}, of other categories "
        f"{_percent(total.out_of_group)}."
    )


def _class_shuffling(found: Findings) -> Section | None:
    shuffling = found.class_shuffling
    if shuffling is None:
        return None
    name = shuffling.class_names[int(np.argmax(shuffling.images))]
    of_class = shuffling.of_class(name)
    text = f"{of_class.images:,} images of {name}: {_percent(of_class.own)} under their own gates"
    if of_class.group is None:
        text += f", {_percent(of_class.shuffled)} under gates of other classes."
    else:
        text += (
            f", {_percent(of_class.in_group)} under gates of other {of_class.group}, "
            f"{_percent(of_class.out_of_group)} under gates of the rest."
        )
    figure = gate_plots.class_shuffling_plot(shuffling, name)
    title = f"Gates of other classes: {name}"
    return Section(title, [text], {"shuffling_of_class": (figure, "Accuracy by the gates' class")})


def _memory(found: Findings) -> Section | None:
    memory = found.memory
    if memory is None:
        return None
    header = ("kept", "parameters", "weights", "file", "peak")
    rows = []
    for v in memory.variants:
        sizes = map(file_size, (v.weight_bytes, v.file_bytes, v.peak_bytes))
        rows.append((f"{v.name}: {v.meaning}", f"{v.parameters:,}", *sizes))
    counted = "what PyTorch's allocator counts" if memory.device == "cuda" else "tensors alive"
    text = [
        "The file is a safetensors file of the weights. The peak is the weights and the most that "
        f"is needed at a time to run one image of {memory.size[0]}x{memory.size[1]} pixels "
        f"({counted})."
    ]
    figures = {"memory": (gate_plots.memory_plot(memory), "Measured bytes")}
    return Section("Memory", text, figures, table=Table(header, rows))


def _training(subject: Subject) -> Section | None:
    runs = {subject.name: subject.metrics} | {c.name: c.metrics for c in subject.beside}
    known = {name: metrics for name, metrics in runs.items() if plots.can_be_drawn(metrics)}
    if subject.name not in known:
        return None
    figures = {"training": (plots.loss_curves(known), "Loss and accuracy by epoch")}
    return Section("Training", (), figures, folded=True)


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"
