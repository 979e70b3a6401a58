"""Channels by their weights alone: batch norm's scale times the norm of what reads the channel."""

from deepmoe.compare.method import pruned
from deepmoe.compare.task import Choice, PruningTask, keep_strongest
from deepmoe.compare.widths import widths_for
from deepmoe.graph import channel_strengths


def select(task: PruningTask) -> Choice:
    """The channels stay that the layers behind read with the largest weights."""
    scores = [s.double() for s in channel_strengths(task.model.network, task.gating)]
    widths = task.widths or widths_for(task.gating, task.size, scores, task.share, task.tilt)
    return keep_strongest(scores, widths)


METHOD = pruned("strength", "weights that read a channel", "this package", select, streams=True)
