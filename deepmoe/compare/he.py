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
from deepmoe.compare.method import pruned
from deepmoe.compare.reconstruction import Sums
from deepmoe.compare.samples import Sampler, training_images
from deepmoe.compare.task import Choice, PruningTask, unit_sums
from deepmoe.compare.widths import strongest

MOST_IMAGES = 2000  # the paper takes about 5000 of ImageNet; the tail of a VGG has 4608 unknowns


@torch.no_grad()
def select(task: PruningTask) -> Choice:
    """The channels stay that a LASSO needs; the layers behind are refitted."""
    widths, original = task.even_widths(), task.model.network
    network = copy.deepcopy(original)
    masks = [torch.ones(group.width, dtype=torch.bool) for group in task.groups]
    stays = torch.ones(len(unit_sums(task)), dtype=torch.bool)
    narrower = [i for i, group in enumerate(task.groups) if widths[i] < group.width]
    images = training_images(task, MOST_IMAGES)
    groups = [task.groups[i] for i in narrower]
    sampler = Sampler(task, images, (original, network), groups)
    for index, group in zip(narrower, groups, strict=True):
        found = [Sums.empty(reader, network) for reader in sampler.readers[group.number]]
        for batch in sampler.samples(group):
            for sums, (then, now) in zip(found, batch, strict=True):
                sums.add(now.x_SCK, then.y_SO, _difference(then.shortcut_SO, now.shortcut_SO))
        found = [sums.of_all_processes() for sums in found]
        start = task.gating.graph.offsets[group.number]
        units = slice(start, start + group.width)
        grams, moments = zip(*(s.by_unit(network, stays, units) for s in found), strict=True)
        coefficients = lasso(
            torch.stack(grams).sum(dim=0), torch.stack(moments).sum(dim=0), widths[index]
        )
        (masks[index],) = strongest([coefficients.abs()], [widths[index]])
        stays[units] = masks[index]
        for sums in found:
            sums.refit(network, original, stays)
    return Choice(tuple(masks), network, refit_norms=True)


def _difference(then: Tensor | None, now: Tensor | None) -> Tensor | None:
    return None if then is None or now is None else then - now


METHOD = pruned("he", "He, LASSO and reconstruction", "He et al. 2017", select)
