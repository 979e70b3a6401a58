"""A local page on which a trained model answers images: see `Demo` for what it shows."""

from deepmoe.demo.showing import Demo, Shown

__all__ = ["Demo", "Shown"]
