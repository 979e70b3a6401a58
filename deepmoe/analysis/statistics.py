"""Numbers drawn from a record of gates."""

import numpy as np

from deepmoe.evaluation import GateRecord


def activity_by_class(record: GateRecord) -> np.ndarray:
    """Share of each layer's channels that run, averaged over the images of each class.

    Returns:
        An array (classes, layers); a class without images has NaN. Images without a class, as of
        segmentation, make one row together.
    """
    shares = np.stack([(gates != 0).mean(axis=1) for gates in record.gates], axis=1)
    if record.labels is None:
        return shares.mean(axis=0, keepdims=True)
    table = np.full((len(record.class_names), len(record.gates)), np.nan)
    for label in np.unique(record.labels):
        table[label] = shares[record.labels == label].mean(axis=0)
    return table


def experts_by_class(record: GateRecord) -> np.ndarray:
    """Share of the images of each class that run each expert, (classes, experts)."""
    assert record.experts is not None and record.labels is not None
    counts = np.zeros((len(record.class_names), int(record.experts.max()) + 1))
    np.add.at(counts, (record.labels, record.experts), 1)
    with np.errstate(invalid="ignore"):
        return counts / counts.sum(axis=1, keepdims=True)
