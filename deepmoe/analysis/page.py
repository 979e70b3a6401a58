"""One self-contained page about a model: everything is inside, nothing is fetched."""

import io
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import torch
from markupsafe import Markup, escape
from PIL import Image

import deepmoe
from deepmoe.analysis.names import readable_layers
from deepmoe.analysis.plots import as_data_uri, data_uri
from deepmoe.analysis.section import Section, Subject
from deepmoe.analysis.sections import all_sections, beside_sentence, headline, tiles
from deepmoe.config import config_to_toml
from deepmoe.console import printable
from deepmoe.costs import format_macs
from deepmoe.evaluation.findings import Findings
from deepmoe.evaluation.pictures import Picture
from deepmoe.evaluation.segmentation_prediction import palette

GENERATOR = "deepmoe"  # tells our pages from others
SMALL_SIDE = 96  # pixels of a picture up to which it is enlarged without a blur


def render_page(
    found: Findings, subject: Subject, sections: Sequence[Section] | None = None
) -> bytes:
    """The page as an HTML file.

    Args:
        found: of the model.
        subject: what it is.
        sections: the parts to show; all that there are if not given.
    """
    template = resources.files("deepmoe").joinpath("analysis", "report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.globals["card"] = lambda picture: _card(picture, found)
    environment.globals["figure_uri"] = lambda figure: Markup(as_data_uri(figure))
    sections = all_sections(found, subject) if sections is None else sections
    html = environment.from_string(template).render(
        generator=GENERATOR,
        title=f"{subject.name} on {subject.data}",
        headline=headline(found, subject),
        beside=beside_sentence(found, subject),
        tiles=tiles(found),
        sections=sections,
        notes=found.notes,
        legend=_legend(found),
        config=escape(config_to_toml(subject.config)),  # the one text of several lines
        checkpoint=subject.checkpoint,
        version=deepmoe.__version__,
        torch_version=torch.__version__,
    )
    return html.encode("utf-8", "replace")


def picture_png(picture: Picture) -> bytes:
    """The image as a PNG file."""
    return _png(picture.pixels)


def mask_png(mask: np.ndarray, classes: int) -> bytes:
    """The class of each pixel, as a colour."""
    return _png(palette(classes)[mask])


def _card(picture: Picture, found: Findings) -> dict[str, Any]:
    """What the page shows of an image."""
    record = found.record
    names = readable_layers(record.layer_names)
    share = picture.macs / record.dense_macs
    if picture.exited:
        ran = "answered by the embedding"
    elif picture.expert is not None:
        ran = f"expert {picture.expert + 1}"
    else:
        ran = ""
    bars = [
        (f"{name}: {active:.0%}", round(100 * active))
        for name, active in zip(names, picture.active, strict=True)
    ]
    right = None if picture.label is None else picture.label == picture.prediction
    mask = picture.mask
    return {
        "image": _uri(picture_png(picture)),
        "mask": None if mask is None else _uri(mask_png(mask, len(record.class_names))),
        "small": max(picture.pixels.shape[:2]) <= SMALL_SIDE,
        "label": picture.label,
        "prediction": picture.prediction,
        "right": right,
        "score": None if np.isnan(picture.score) else f"{picture.score:.0%} of the pixels right",
        "macs": f"{format_macs(picture.macs)} MACs, {share:.0%}",
        "percent": min(100, round(100 * share)),
        "ran": ran,
        "bars": [] if picture.exited else bars,
    }


def _legend(found: Findings) -> list[tuple[str, str]]:
    """The colours of masks: name of the class, and colour."""
    if not any(picture.mask is not None for picture in found.cheapest):
        return []
    names = found.record.class_names
    colours = palette(len(names)).tolist()
    return [(name, f"rgb{tuple(colour)}") for name, colour in zip(names, colours, strict=True)]


def _uri(png: bytes) -> Markup:
    return Markup(data_uri(png, "png"))  # nothing in it needs to be escaped


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()
