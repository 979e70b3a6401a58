"""Taylor importance: what the loss would feel if a channel went.

Mean over images of |d loss / d gate| for a gate at 1, at temperature 4. How many channels go from
which group follows from what they are worth for each MAC, as far as `tilt` says.
"""

from deepmoe.compare.method import pruned
from deepmoe.compare.task import Choice, PruningTask, keep_strongest
from deepmoe.compare.widths import widths_for
from deepmoe.evaluation.importance import channel_importance

JUDGED_IMAGES = 4096


def select(task: PruningTask) -> Choice:
    """The channels stay that the loss would miss most."""
    batches = task.loader.epoch(0)
    importance = channel_importance(task.model, task.gating, batches, JUDGED_IMAGES)
    scores = importance.split(list(task.gating.widths))
    widths = task.widths or widths_for(task.gating, task.size, scores, task.share, task.tilt)
    return keep_strongest(scores, widths)


METHOD = pruned("taylor", "Taylor importance", "Molchanov et al. 2017", select, streams=True)
