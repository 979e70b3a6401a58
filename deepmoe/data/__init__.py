"""Data sets, batched augmentation, reproducible loaders."""

from deepmoe.data.decode import read_image
from deepmoe.data.info import DataInfo
from deepmoe.data.interface import Batch, DataSource, Loader
from deepmoe.data.loader import BatchLoader, Shard, derive_seed
from deepmoe.data.source import open_data
from deepmoe.data.split import Split
from deepmoe.data.torch_datasets import open_datasets

__all__ = [
    "Batch",
    "BatchLoader",
    "DataInfo",
    "DataSource",
    "Loader",
    "Shard",
    "Split",
    "derive_seed",
    "open_data",
    "open_datasets",
    "read_image",
]
