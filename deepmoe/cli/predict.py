"""The verb `predict`."""

import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.common import json_option, network_option, next_command, sparse_option
from deepmoe.cli.examples import example
from deepmoe.console import complain, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from deepmoe.checkpoint import Checkpoint
    from deepmoe.evaluation import SegmentationPrediction
    from deepmoe.evaluation.prediction import Answer

LEGEND_NAME = "legend.png"
MARK, MARKED = "Software", "deepmoe predict"  # in each picture: later calls replace only these


@click.command(**example("deepmoe predict runs/quickstart/deepmoe/last.safetensors photos/"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--top", default=3, show_default=True, help="How many classes to print.")
@click.option("--csv", "table", type=click.Path(path_type=Path), help="Also write a CSV file.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="For segmentation: folder to write to, NAME.classes.png and NAME.overlay.png for each "
    "image, and legend.png.",
)
@network_option
@sparse_option
@json_option
def predict(
    checkpoint: Path,
    images: tuple[Path, ...],
    top: int,
    table: Path | None,
    out: Path | None,
    network: str | None,
    sparse: bool,
    as_json: bool,
) -> None:
    """Classify or segment IMAGES, and print what each one cost.

    IMAGES are files, folders, or patterns such as "photos/**/*.jpg". Images that can't be read are
    reported and skipped; the exit code is then 2.
    """
    from deepmoe.checkpoint import load_checkpoint
    from deepmoe.evaluation import SegmentationPrediction, Unanswered
    from deepmoe.evaluation.prediction_csv import START, predictions_csv
    from deepmoe.files import check_replaceable, write_atomically

    if table is not None:
        check_replaceable(table, START)
    if out is not None and out.is_dir() and os.path.realpath(out) in map(os.path.realpath, images):
        raise UserError(f"--out takes a folder of its own, but {out} holds the images")
    loaded = load_checkpoint(checkpoint, network=network)
    pictures = None if out is None else Pictures(out, loaded)
    if sparse:
        from deepmoe.sparse import Plan, sparsify

        # A few images are not worth the time that it takes to find the fastest way.
        loaded = replace(loaded, model=sparsify(loaded.model, plan=Plan()))
    answers: list[dict[str, Any]] = []
    for answer in _answers(loaded, images, out, top):
        answers.append(answer.as_dict())
        if isinstance(answer, Unanswered):
            complain(f"Error: {answer}")
            continue
        if pictures is not None and isinstance(answer, SegmentationPrediction):
            answers[-1]["pictures"] = [str(path) for path in pictures.write(answer)]
        if not as_json:
            say(answer)
    if table is not None:
        # Names of files may hold bytes that are no text.
        write_atomically(table, predictions_csv(answers).encode("utf-8", "backslashreplace"))
    failed = sum("error" in answer for answer in answers)
    if as_json:
        say(json.dumps(answers, indent=2))
    elif len(answers) > failed:
        _tell_end(answers, failed, [str(path) for path in (table, out) if path is not None])
        if loaded.model.exit_at is not None:
            next_command("deepmoe bench exits", checkpoint, network)
        elif loaded.model.gated:
            next_command("deepmoe bench sparse", checkpoint, network)
    if failed:
        sys.exit(UserError.exit_code)


def _answers(
    loaded: "Checkpoint", images: tuple[Path, ...], out: Path | None, top: int
) -> "Iterator[Answer]":
    """What is said of each image; a path that stands for none has an answer that says so."""
    from deepmoe.data.image_paths import image_files
    from deepmoe.evaluation import Unanswered, predict_each
    from deepmoe.progress import progress

    found: list[Path | Unanswered] = []
    for given in images:
        try:
            found += image_files(given, [] if out is None else [out])
        except UserError as error:
            found.append(Unanswered(str(given), str(error)))
    answers = predict_each(loaded, [item for item in found if isinstance(item, Path)], top)
    with progress("predicting", len(found), "images") as work:
        for item in found:
            yield next(answers) if isinstance(item, Path) else item
            work.advance()
    next(answers, None)  # a mistake of the model is told even where there is no image


def _tell_end(answers: list[dict[str, Any]], failed: int, written: list[str]) -> None:
    from deepmoe.costs import format_macs

    good = [answer for answer in answers if "error" not in answer]
    if len(answers) > 1:
        macs, ms = (sum(answer[key] for answer in good) / len(good) for key in ("macs", "ms"))
        lost = f"; {failed} could not be read" if failed else ""
        say(f"{len(good):,} images: {format_macs(macs)} MACs and {ms:.1f} ms on average{lost}")
    for path in written:
        say(f"written: {path}")


class Pictures:
    """The pictures that a segmentation leaves in a folder.

    Args:
        folder: is made if it is not there.
        loaded: a model that segments.
    """

    def __init__(self, folder: Path, loaded: "Checkpoint") -> None:
        from deepmoe.evaluation.segmentation_prediction import legend

        if loaded.info.task != "segmentation":
            raise UserError(
                "--out is for segmentation models, but this model classifies: leave it out"
            )
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out takes a folder, but {folder} is a file")
        self.folder = folder
        self.names: set[str] = {LEGEND_NAME}
        if self._is_foreign(LEGEND_NAME):
            raise UserError(f"{folder / LEGEND_NAME} is there already: choose another --out")
        self._save(LEGEND_NAME, legend(loaded.info.class_names))

    def write(self, answer: "SegmentationPrediction") -> list[Path]:
        """The classes, and the image under their colours."""
        pictures = {"classes": answer.coloured(), "overlay": answer.overlay()}
        stem = Path(answer.image).stem
        # An image of another folder may be called so, or something else lie here.
        while any(
            name in self.names or self._is_foreign(name)
            for name in (f"{stem}.{kind}.png" for kind in pictures)
        ):
            stem += "_"
        return [self._save(f"{stem}.{kind}.png", image) for kind, image in pictures.items()]

    def _is_foreign(self, name: str) -> bool:
        """Whether there is something that an earlier call did not leave."""
        from PIL import Image

        path = self.folder / name
        try:
            with Image.open(path, formats=("PNG",)) as picture:
                return bool(picture.info.get(MARK) != MARKED)
        except (OSError, ValueError, SyntaxError):  # also where no file is, or no image
            return os.path.lexists(path)

    def _save(self, name: str, picture: "Image") -> Path:
        from PIL.PngImagePlugin import PngInfo

        from deepmoe.files import write_atomically

        self.names.add(name)
        drawn = io.BytesIO()
        marked = PngInfo()
        marked.add_text(MARK, MARKED)
        picture.save(drawn, format="PNG", pnginfo=marked)
        write_atomically(self.folder / name, drawn.getvalue())
        return self.folder / name
