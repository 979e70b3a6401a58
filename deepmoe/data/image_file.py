"""A single image file, for prediction."""

from pathlib import Path

from torch import Tensor

from deepmoe.config import DataConfig
from deepmoe.data.decode import decode_box
from deepmoe.data.image_folder import evaluation_box
from deepmoe.data.workers import Unreadable
from deepmoe.errors import UserError


def read_image(path: str | Path, size: int, config: DataConfig) -> Tensor:
    """Reads an image file as the evaluation of a data set would, as uint8 image_CHW.

    Args:
        path: of the file.
        size: pixels a side of the result.
        config: of the data set: images of a folder are cut at the centre, others taken whole.
    """
    try:
        content = Path(path).read_bytes()
        choose = evaluation_box(config, size) if config.name == "image-folder" else _whole
        return decode_box(content, choose, size, shrink=False)
    except (Unreadable, ValueError) as error:
        raise UserError(f"cannot read image {path}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read image {path}: {error.strerror}") from error


def _whole(width: int, height: int) -> tuple[float, float, float, float]:
    return 0.0, 0.0, float(width), float(height)
