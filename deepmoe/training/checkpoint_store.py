"""The checkpoints in a run's folder, by name."""

import os
import shutil
from pathlib import Path

from deepmoe.checkpoint import BEST_NAME, LAST_NAME, TrainState
from deepmoe.errors import UserError


class CheckpointStore:
    """The checkpoints of a run's folder: the last, the newest few of finished epochs, the best.

    Args:
        folder: of the run.
        keep: how many of the finished epochs to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.last = folder / LAST_NAME
        self.best = folder / BEST_NAME

    def keep_epoch(self, state: TrainState) -> None:
        """Gives the last checkpoint, of a finished epoch, its other names; drops old ones.

        Can be done again: a run may have been killed before it came to this.
        """
        if state.is_best:
            _link(self.last, self.best)
        if self.keep:
            _link(self.last, self.folder / f"epoch-{state.epoch:04d}.safetensors")
        for old in self.epochs()[: -self.keep or None]:
            old.unlink()

    def epochs(self) -> list[Path]:
        """Checkpoints of finished epochs, oldest first."""
        return sorted(self.folder.glob("epoch-*.safetensors"))

    def any(self) -> bool:
        """Whether there is any checkpoint."""
        return self.last.exists() or self.best.exists() or bool(self.epochs())

    def clear(self) -> None:
        """Removes all checkpoints."""
        for path in [self.last, self.best, *self.epochs()]:
            path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Makes a second name for a file that is never changed in place; a copy where that fails."""
    draft = target.with_name(f"{target.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        try:
            os.link(source, draft)
        except OSError:
            shutil.copyfile(source, draft)
        draft.replace(target)
        draft.unlink(missing_ok=True)  # it is still there where both were names of one file
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from error
