"""What is shown of an image, as HTML. Names of classes and layers may hold anything."""

import io
from html import escape

import numpy as np

from deepmoe.analysis.gate_plots import channel_plot
from deepmoe.analysis.plots import as_data_uri, data_uri
from deepmoe.console import printable
from deepmoe.costs import format_macs
from deepmoe.demo.showing import Shown
from deepmoe.evaluation import Prediction, SegmentationPrediction
from deepmoe.evaluation.segmentation_prediction import palette

PICTURE_SIDE = 240  # pixels that a small image is enlarged to
STYLE = """
.moe { line-height: 1.45; }
.moe h2 { font-size: 1.6rem; margin: 0 0 .6rem; }
.moe h3 { font-size: .95rem; margin: 1.4rem 0 .4rem; font-weight: 600; }
.moe .row { display: grid; grid-template-columns: 9rem 1fr 8rem; gap: .8rem; margin: .25rem 0;
  align-items: center; }
.moe .name { overflow-wrap: anywhere; }
.moe .bar { background: #e2e8f0; border-radius: 4px; height: .8rem; overflow: hidden; }
.moe .bar i { display: block; height: 100%; background: #2563eb; }
.moe .bar i.dense { background: #94a3b8; }
.moe .number { text-align: right; font-variant-numeric: tabular-nums; }
.moe .swatch { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px;
  margin-right: .5rem; }
.moe p.told { color: #64748b; margin: .3rem 0; font-size: .9rem; }
.moe p.error { background: #fef2f2; color: #991b1b; border-radius: 6px; padding: .7rem 1rem; }
.moe img.channels { width: 100%; background: white; border-radius: 6px; }
.moe img.seen { display: block; max-width: 100%; border-radius: 6px; }
#samples .grid-container { grid-template-columns: repeat(8, 1fr) !important; gap: 4px;
  min-height: 0; height: auto; }
#samples .thumbnail-item { height: auto; aspect-ratio: 1; }
.moe img.small { image-rendering: pixelated; }
"""
EMPTY = '<div class="moe"><p class="told">Drop an image to see what the network does.</p></div>'


def error_card(sentence: str) -> str:
    """A mistake, in the sentence that says it."""
    return f'<div class="moe"><p class="error" role="alert">{_text(sentence)}</p></div>'


def note_card(sentence: str, title: str = "") -> str:
    """A sentence, under a title if there is one."""
    heading = f"<h2>{_text(title)}</h2>" if title else ""
    return f'<div class="moe">{heading}{_told(sentence)}</div>'


def answer_card(shown: Shown) -> str:
    """Answer, costs and channels."""
    parts = [*_answer(shown), *_costs(shown), *_channels(shown)]
    return f'<div class="moe">{"".join(parts)}</div>'


def image_card(shown: Shown) -> str:
    """What the network saw, or for segmentation the image under the colours of its classes."""
    from PIL import Image

    if isinstance(shown.answer, SegmentationPrediction):
        picture, told = shown.answer.overlay(), "The image under the colours of its classes."
    else:
        picture = Image.fromarray(shown.pixels_HWC)
        told = f"What the network saw: {picture.width} x {picture.height} pixels."
    small = picture.width < PICTURE_SIDE
    kind, width = ("seen small", f' width="{PICTURE_SIDE}"') if small else ("seen", "")
    drawn = io.BytesIO()
    picture.save(drawn, format="PNG")
    source = data_uri(drawn.getvalue(), "png")
    return (
        f'<div class="moe"><img class="{kind}"{width} alt="the image" src="{source}">'
        f'<p class="told">{told}</p></div>'
    )


def _answer(shown: Shown) -> list[str]:
    answer = shown.answer
    if isinstance(answer, Prediction):
        rows = [_row(name, share, f"{share:.1%}") for name, share in answer.top]
        return [f"<h2>{_text(answer.label)}</h2>", *rows, _told(_by_whom(shown))]
    colours = palette(len(answer.class_names))
    counts = np.bincount(answer.labels_HW.ravel(), minlength=len(colours))
    rows = []
    for number in np.argsort(-counts, kind="stable"):
        if counts[number]:
            share = counts[number] / answer.labels_HW.size
            colour = "#" + bytes(colours[number].tolist()).hex()
            rows.append(_row(answer.class_names[number], share, f"{share:.1%}", colour))
    return ["<h3>Classes of the pixels</h3>", *rows]


def _by_whom(shown: Shown) -> str:
    if shown.expert is not None:
        return "Answered by expert {} of {}.".format(*shown.expert)
    if shown.answered_by == "embedding":
        return "Answered by the embedding (early exit): the base network did not run."
    exits = isinstance(shown.answer, Prediction) and shown.answer.exits
    return "Answered by the base network" + (": no early exit." if exits else ".")


def _costs(shown: Shown) -> list[str]:
    answer = shown.answer
    share = answer.macs / answer.dense_macs
    told = f"{format_macs(answer.macs)} ({share:.0%})"
    longest = max(answer.macs, answer.dense_macs)
    found = [
        "<h3>MACs</h3>",
        _row("this image", answer.macs / longest, told),
        _row("dense network", answer.dense_macs / longest, format_macs(answer.dense_macs), None),
        "<h3>Time</h3>",
    ]
    slowest = max(answer.ms, shown.dense_ms or 0.0)
    found.append(_row("this image", answer.ms / slowest, f"{answer.ms:.2f} ms"))
    if shown.dense_ms is not None:
        told = f"{shown.dense_ms:.2f} ms"
        found.append(_row("dense network", shown.dense_ms / slowest, told, None))
    return found if shown.note is None else [*found, _told(shown.note)]


def _channels(shown: Shown) -> list[str]:
    if not shown.layers:
        early = shown.answered_by == "embedding"
        return [] if early else [_told("There are no gates: all channels of the network ran.")]
    ran = [layer.ran for layer in shown.layers]
    total, count = sum(map(len, ran)), sum(map(sum, ran))
    source = as_data_uri(channel_plot([layer.name for layer in shown.layers], ran))
    return [
        f"<h3>Channels that ran: {count:,} of {total:,}</h3>",
        f'<img class="channels" alt="channels that ran, layer by layer" src="{source}">',
    ]


def _row(name: str, share: float, told: str, colour: str | None = "#2563eb") -> str:
    """A bar between its name and its number; grey without a colour."""
    swatch = ""
    if colour not in (None, "#2563eb"):
        swatch = f'<span class="swatch" style="background:{colour}"></span>'
    look = 'class="dense" ' if colour is None else ""
    fill = "" if colour is None else f";background:{colour}"
    return (
        f'<div class="row"><span class="name">{swatch}{_text(name)}</span>'
        f'<span class="bar"><i {look}style="width:{100 * share:.1f}%{fill}"></i></span>'
        f'<span class="number">{told}</span></div>'
    )


def _told(sentence: str) -> str:
    return f'<p class="told">{_text(sentence)}</p>'


def _text(name: str) -> str:
    return escape(printable(name))
