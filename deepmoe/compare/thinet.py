"""ThiNet (Luo et al. 2017): channels go whose loss the next layer feels least.

From the first group of channels to the last, in the network as pruned so far: channels go one by
one, each time the one that leaves the smallest squared sum of all that is gone, at some positions
and outputs of the layer behind. Then a factor for each channel that stays, found by least squares
and multiplied into that layer's weights, makes up for the others. A group with several readers has
samples of all of them.

The paper fine-tunes for an epoch or two after each layer. Here all layers go first: training
follows once, as for every method. Streams keep all channels, unless widths are given.
"""

import copy

import torch
from torch import Tensor, nn

from deepmoe.compare.least_squares import corrections
from deepmoe.compare.method import pruned
from deepmoe.compare.readers import Reader
from deepmoe.compare.samples import Sampler, training_images
from deepmoe.compare.task import Choice, PruningTask
from deepmoe.data import derive_seed
from deepmoe.graph import Group
from deepmoe.processes import sum_over_processes

IMAGES_OF_CLASS = 10
MOST_IMAGES = 10_000


@torch.no_grad()
def select(task: PruningTask) -> Choice:
    """The channels stay that the next layer would miss; its weights make up for the others."""
    widths, network = task.even_widths(), copy.deepcopy(task.model.network)
    masks = [torch.ones(group.width, dtype=torch.bool) for group in task.groups]
    narrower = [i for i, group in enumerate(task.groups) if widths[i] < group.width]
    images = training_images(task, MOST_IMAGES, IMAGES_OF_CLASS)
    groups = [task.groups[i] for i in narrower]
    sampler = Sampler(task, images, (network,), groups)
    for index, group in zip(narrower, groups, strict=True):
        gram = _gram(task, network, sampler, group)
        masks[index][least_felt(gram, group.width - widths[index])] = False
        factors = torch.cat([factors_for(gram, masks[index]), gram.new_ones(1)])  # others stay
        for reader in sampler.readers[group.number]:
            weight_OCK = reader.weight(network)
            of_input = factors[_numbers(reader, task, group)].to(weight_OCK)
            weight_OCK.mul_(of_input[None, :, None])
    return Choice(tuple(masks), network, refit_norms=True)


def _gram(task: PruningTask, network: nn.Module, sampler: Sampler, group: Group) -> Tensor:
    """X'X, where X is what each unit of a group adds to one random output of a reader."""
    readers = sampler.readers[group.number]
    device = next(network.parameters()).device
    gram = torch.zeros(group.width, group.width, dtype=torch.float64, device=device)
    numbers = [_numbers(reader, task, group).to(device) for reader in readers]
    generator = torch.Generator().manual_seed(derive_seed(task.seed, group.number, 1))
    for batch in sampler.samples(group):
        for reader, number, (sample,) in zip(readers, numbers, batch, strict=True):
            weight_OCK = reader.weight(network)
            drawn = torch.randint(len(weight_OCK), (len(sample.x_SCK),), generator=generator)
            x_SC = (sample.x_SCK * weight_OCK[drawn.to(device)]).double().sum(dim=2)
            x_SU = x_SC.new_zeros(len(x_SC), group.width + 1).index_add_(1, number, x_SC)[:, :-1]
            gram.addmm_(x_SU.T, x_SU)
    return sum_over_processes(gram).cpu()


def least_felt(gram: Tensor, count: int) -> list[int]:
    """Columns of X that go, one by one: each time the next whose sum with those has least square.

    Args:
        gram: X'X.
        count: how many go.
    """
    gone: list[int] = []
    cross = torch.zeros_like(gram[0])  # of each column with the sum of those that are gone
    for _ in range(count):
        cost = 2 * cross + gram.diagonal()
        cost[gone] = float("inf")
        gone.append(int(cost.argmin()))
        cross += gram[gone[-1]]
    return gone


def factors_for(gram: Tensor, stays: Tensor) -> Tensor:
    """What to multiply the columns of X with, that their sum is what it was; 0 for those that go.

    Args:
        gram: X'X.
        stays: which columns do.
    """
    missing = gram[stays][:, ~stays].sum(dim=1, keepdim=True)
    factors = stays.to(gram)
    factors[stays] += corrections(gram[stays][:, stays], missing).flatten()
    return factors


def _numbers(reader: Reader, task: PruningTask, group: Group) -> Tensor:
    """For each input of a layer, which unit of a group it is; the group's width for another."""
    number = reader.layer.ins - task.gating.graph.offsets[group.number]
    return torch.where((number >= 0) & (number < group.width), number, group.width)


METHOD = pruned("thinet", "ThiNet", "Luo et al. 2017", select)
