"""What a page tells of gates: routes, layers, gates of other classes, memory."""

import numpy as np

from deepmoe.analysis import gate_plots
from deepmoe.analysis.names import file_size, readable_layers
from deepmoe.analysis.section import Section, Table
from deepmoe.evaluation.findings import Findings

MOST_ROWS = 12  # of a table that is not folded away


def routes_section(found: Findings) -> Section | None:
    """Which channels run for which classes, and how often routes repeat."""
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


def experts_section(found: Findings) -> Section | None:
    """Which experts run for which classes."""
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


def layers_section(found: Findings) -> Section | None:
    """What the gates of each layer do."""
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


def shuffling_section(found: Findings) -> Section | None:
    """What gates of other classes do."""
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
        text += f"classes {_percent(total.shuffled)}."
    else:
        text += (
            f"classes of the same category {_percent(total.in_group)}, of other categories "
            f"{_percent(total.out_of_group)}."
        )
    return f"{text} There, {_percent(total.followed)} of the answers are the class of the gates."


def class_shuffling_section(found: Findings) -> Section | None:
    """The same for one class."""
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


def memory_section(found: Findings) -> Section | None:
    """What the network weighs, kept in several ways."""
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


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"
