"""Channel Pruning for Accelerating Very Deep Networks (He et al. 2017): LASSO and reconstruction.

From the first group of channels to the last: a LASSO finds which of them explain best what the
layer behind gave in the original network, and least squares refit that layer's weights to the
channels that stay. Inputs are those of the network as pruned so far, so that layers also mend what
went wrong before them. At the end of a residual block the target has what the shortcut lacks.

A group with several readers has one LASSO for all of their outputs. The paper also lets a block's
first convolution read a chosen part of the residual stream. Here channels go for all readers or
none, so that streams keep theirs, unless widths are given that say otherwise.
"""

import copy

import torch
from torch import Tensor

from deepmoe.compare.least_squares import lasso
from deepmoe.compare.readers import readers_of
from deepmoe.compare.reconstruction import Sums
from deepmoe.compare.samples import samples, training_images
from deepmoe.compare.task import Choice, PruningTask, unit_sums
from deepmoe.compare.widths import strongest

MOST_IMAGES = 2000  # the paper takes about 5000 of ImageNet; the tail of a VGG has 4608 unknowns


@torch.no_grad()
def select(task: PruningTask) -> Choice:
    """The channels stay that a LASSO needs; the layers behind are refitted."""
    widths, original = task.even_widths(), task.model.network
    network = copy.deepcopy(original)
    images = training_images(task, MOST_IMAGES)
    stays = torch.ones(len(unit_sums(task)), dtype=torch.bool)
    masks: list[Tensor] = []
    for index, (group, width) in enumerate(zip(task.groups, widths, strict=True)):
        if width == group.width:
            masks.append(torch.ones(width, dtype=torch.bool))
            continue
        found = [Sums.empty(reader, network) for reader in readers_of(task, group)]
        readers = [sums.reader for sums in found]
        for batch in samples(task, readers, images, (original, network), index):
            for sums, (then, now) in zip(found, batch, strict=True):
                sums.add(now.x_SCK, then.y_SO, _difference(then.shortcut_SO, now.shortcut_SO))
        start = task.gating.graph.offsets[group.number]
        units = slice(start, start + group.width)
        found = [sums.of_all_processes() for sums in found]
        normal = [sums.by_unit(network, stays, units) for sums in found]
        scores = lasso(sum(z for z, _ in normal), sum(y for _, y in normal), width).abs()
        masks += strongest([scores], [width])
        stays[units] = masks[-1]
        for sums in found:
            sums.refit(network, original, stays)
    return Choice(tuple(masks), network)


def _difference(then: Tensor | None, now: Tensor | None) -> Tensor | None:
    return None if then is None or now is None else then - now
