"""The command line: `deepmoe VERB`."""

from deepmoe.cli.verbs import main

__all__ = ["main"]
