"""Methods and settings of a small comparison, and how it is called."""

from click.testing import CliRunner, Result

from deepmoe.cli import main

SETTINGS = (
    "model.gates=none",
    "model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]",
    "train.epochs=1",
    "train.finetune_epochs=0",
    "data.holdout=300",
)
METHODS = ("slimming", "ours-exits", "dense")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])
