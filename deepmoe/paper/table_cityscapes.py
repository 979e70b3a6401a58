"""Segmentation: DRN-A-50, wide, and DeepMoE A and B; IoU of each class, and pictures."""

import statistics

import numpy as np
import torch
from matplotlib.figure import Figure

from deepmoe.data.segmentation_files import VOID
from deepmoe.evaluation.batches import EvenlySpread, batches_for
from deepmoe.evaluation.segmentation_prediction import palette
from deepmoe.paper.measured import opened
from deepmoe.paper.page import MACS, MORE_TRAINING, Column, Made, Page, Row, Shown
from deepmoe.paper.plan import Plan

DATA, SEEDS = "cityscapes", 3
PICTURES = 3
A, B = "drn_a_50", "drn_a_50-b"
A_SHARE = 0.5  # of the channels: the MACs of DRN-A-50 itself
B_SHARE = 0.8  # the paper's B has 80 % of the MACs of the wide DRN-A-50
DENSE = {"accuracy": 67.3, "macs": 703e9}
WIDE_DENSE = {"accuracy": 69.3, "macs": 2173e9}
WIDE_A = {"accuracy": 68.8, "macs": 804e9}
WIDE_B = {"accuracy": 71.2, "macs": 1738e9}


def rows(plan: Plan) -> list[Row]:
    """Four networks of the paper, DeepMoE by both recipes, and what B is without gates."""
    seeds = plan.seeds(SEEDS)
    kinds = {
        ("DRN-A-50", "dense"): ([plan.dense(DATA, A, s) for s in seeds], DENSE),
        ("wide DRN-A-50 A", "dense"): (
            [plan.dense(DATA, A, s, wide=2) for s in seeds],
            WIDE_DENSE,
        ),
        ("wide DRN-A-50 A", "DeepMoE, ours"): (
            [plan.ours(DATA, A, A_SHARE, s, wide=2) for s in seeds],
            WIDE_A,
        ),
        ("wide DRN-A-50 A", "DeepMoE, literal"): (
            [plan.literal(DATA, A, s, wide=2) for s in seeds],
            WIDE_A,
        ),
        ("wide DRN-A-50 B", "dense"): ([plan.dense(DATA, B, s, wide=2) for s in seeds], {}),
        ("wide DRN-A-50 B", "DeepMoE, ours"): (
            [plan.ours(DATA, B, B_SHARE, s, wide=2) for s in seeds],
            WIDE_B,
        ),
        ("wide DRN-A-50 B", "DeepMoE, literal"): (
            [plan.literal(DATA, B, s, wide=2) for s in seeds],
            WIDE_B,
        ),
    }
    return [
        Row({"network": network, "method": method}, tuple(runs), paper)
        for (network, method), (runs, paper) in kinds.items()
    ]


def more(made: Made) -> list[Shown]:
    """IoU of each class, a column for each network."""
    ious = {}
    for line in made.lines:
        found = [
            made.results[run].figures.get("iou") for run in line["runs"] if run in made.results
        ]
        ious[line["row"]] = [iou for iou in found if iou]
    classes = list(dict.fromkeys(name for found in ious.values() for iou in found for name in iou))
    cells = tuple(
        (name, *(_mean([iou.get(name) for iou in found]) for found in ious.values()))
        for name in classes
    )
    return [Shown("IoU of each class", ("class", *ious), cells)]


def _mean(values: list[float | None]) -> str:
    there = [100 * value for value in values if value is not None]
    if not there:
        return "-"
    spread = f" ± {statistics.stdev(there):.2f}" if len(there) > 1 else ""
    return f"{statistics.fmean(there):.2f} %{spread}"


@torch.inference_mode()
def plot(made: Made) -> Figure:
    """A few test images, the truth, and what the first seed of each network makes of them."""
    columns: dict[str, list[np.ndarray]] = {}
    for line in made.lines:
        run = line["runs"][0]
        if run not in made.results or not made.checkpoint(run).exists():
            continue
        with opened(made.checkpoint(run), made.plan, DATA) as (loaded, source):
            model, info = loaded.model, loaded.info
            some = batches_for(model, EvenlySpread(source.evaluation, PICTURES))
            seen = [(x, y) for batch in some for x, y in zip(*batch, strict=True)]
            answers = [model(x[None]).logits.argmax(dim=1)[0] for x, _ in seen]
            if not columns:
                photos = [info.to_pixels(x[None])[0].permute(1, 2, 0) for x, _ in seen]
                columns["image"] = [photo.cpu().numpy() for photo in photos]
                columns["truth"] = [_coloured(y, info.classes) for _, y in seen]
            columns[line["row"]] = [_coloured(answer, info.classes) for answer in answers]
    return _side_by_side(columns)


def _side_by_side(columns: dict[str, list[np.ndarray]]) -> Figure:
    height = max((len(pictures) for pictures in columns.values()), default=1)
    figure = Figure(figsize=(2.6 * max(1, len(columns)), 2.2 * height), layout="constrained")
    axes = figure.subplots(height, max(1, len(columns)), squeeze=False)
    for place in axes.flat:
        place.axis("off")
    for column, (title, pictures) in enumerate(columns.items()):
        axes[0, column].set_title(title, fontsize=7)
        for row, picture in enumerate(pictures):
            axes[row, column].imshow(picture)
    return figure


def _coloured(labels_HW: torch.Tensor, classes: int) -> np.ndarray:
    """A colour for each class; pixels that do not count are black."""
    colours = np.zeros((VOID + 1, 3), dtype=np.uint8)
    colours[:classes] = palette(classes)
    return colours[labels_HW.cpu().numpy()]


PAGE = Page(
    name="table-cityscapes",
    title="segmentation: DRN-A-50, wide, and DeepMoE A and B; IoU of each class",
    data=(DATA,),
    takes={"full": "weeks", "short": "about 5 min on CamVid", "smoke": "15 s"},
    shortened=(
        "CamVid (480x360, 11 classes) in place of Cityscapes (2048x1024, 19 classes), crops of "
        "240x320, {epochs} epochs in one cycle from scratch in place of 250"
    ),
    rows=rows,
    columns=(Column("accuracy", "mean IoU", compared=True), MACS),
    plot=plot,
    notes=(
        "On CamVid, neither IoU nor MACs can be compared with the paper's, only the order of the "
        "networks. We count 1,350 G MACs for all channels of B on Cityscapes, less than the paper "
        "has for those that run (1,738 G): its B is probably not ours.",
        "CamVid's classes are 0 sky, 1 building, 2 pole, 3 road, 4 sidewalk, 5 tree, 6 sign, "
        "7 fence, 8 car, 9 pedestrian and 10 bicyclist.",
        MORE_TRAINING,
    ),
    more=more,
)
