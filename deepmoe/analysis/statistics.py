"""Numbers drawn from a record of gates."""

import numpy as np

from deepmoe.evaluation import GateRecord


def activity_by_class(record: GateRecord) -> np.ndarray:
    """Share of each layer's channels that run, averaged over the images of each class.

    Returns:
        An array (classes, layers); a class without images has NaN.
    """
    shares = np.stack([(gates != 0).mean(axis=1) for gates in record.gates], axis=1)
    table = np.full((len(record.class_names), len(record.gates)), np.nan)
    for label in np.unique(record.labels):
        table[label] = shares[record.labels == label].mean(axis=0)
    return table
