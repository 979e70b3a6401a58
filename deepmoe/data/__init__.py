"""Data sets in memory, batched augmentation, reproducible loaders."""

from deepmoe.data.dataset import ImageData, Split, load_data
from deepmoe.data.image_file import read_image
from deepmoe.data.loader import BatchLoader

__all__ = ["BatchLoader", "ImageData", "Split", "load_data", "read_image"]
