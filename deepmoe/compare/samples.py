"""Samples of what layers read and give, of which `he` and `thinet` are computed."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from deepmoe.compare.passes import Held, Pass, Sample
from deepmoe.compare.readers import Reader, readers_of
from deepmoe.compare.task import PruningTask
from deepmoe.costs import as_pair
from deepmoe.data import derive_seed
from deepmoe.evaluation.batches import batches_for
from deepmoe.graph import Group

MOST_HELD = 2**31  # bytes of what images have become on their way
MOST_BYTES = 2**30  # of images, which are held while layers take their turns
BATCH_PIXELS = 2**18  # 256 images of CIFAR's size
LEAST_BATCH = 8


def training_images(task: PruningTask, most: int, of_class: int | None = None) -> list[Tensor]:
    """Training images in batches, such as the model takes but in main memory.

    Args:
        task: whose loader is asked for its first epoch.
        most: how many at most; fewer where they are large.
        of_class: how many of one class at most; labels of pixels are not looked at.
    """
    graph, (height, width) = task.gating.graph, as_pair(task.size)
    most = min(most, max(LEAST_BATCH, MOST_BYTES // (4 * graph.colours * height * width)))
    if of_class is not None:
        most = min(most, of_class * graph.classes)
    found: list[Tensor] = []
    seen: Counter[int] = Counter()
    for x_BCHW, labels in batches_for(task.model, task.loader.epoch(0)):
        classes = labels.tolist() if labels.dim() == 1 else [None] * len(labels)
        for image, label in zip(x_BCHW.cpu(), classes, strict=True):
            if of_class is None or label is None or seen[label] < of_class:
                seen[label] += 1
                found.append(image.clone())  # else all of the batch would be held
        if len(found) >= most:
            break
    size = max(LEAST_BATCH, BATCH_PIXELS // (height * width))
    return list(torch.stack(found[:most]).split(size))


class Sampler:
    """Takes samples of a group's readers after another's, front to back.

    What stands before the readers that are still to come never changes again. It is held for the
    next group, as far as memory allows: else every group would cost a pass from the images on.

    Args:
        task: of the networks.
        images: in batches.
        networks: the task's, or with other weights, of which only readers change.
        groups: that will be asked for, in this order.
    """

    def __init__(
        self,
        task: PruningTask,
        images: Sequence[Tensor],
        networks: Sequence[nn.Module],
        groups: Sequence[Group],
    ) -> None:
        self.task, self.networks = task, networks
        self.program = task.gating.graph.program
        self.order = {node: number for number, node in enumerate(self.program.nodes)}
        self.readers = {group.number: readers_of(task, group) for group in groups}
        (first,) = self.program.find_nodes(op="placeholder")
        self.held = [[Held(first, {first: x}) for _ in networks] for x in images]

    def samples(self, group: Group) -> Iterator[list[list[Sample]]]:
        """For each batch, samples of each reader in each network, at the same positions."""
        readers = self.readers[group.number]
        to_come = [r for number, of in self.readers.items() if number >= group.number for r in of]
        cut = min((reader.node for reader in to_come), key=self.order.__getitem__)
        generator = torch.Generator().manual_seed(derive_seed(self.task.seed, group.number))
        most = MOST_HELD // (len(self.held) * len(self.networks))
        for of_batch in self.held:
            positions: dict[Reader, Tensor] = {}
            found = []
            for number, network in enumerate(self.networks):
                run = Pass(
                    self.program, network, readers, positions, generator, of_batch[number], cut
                )
                found.append(run.samples())
                if run.at_cut is not None and run.at_cut.nbytes <= most:
                    of_batch[number] = run.at_cut
            yield [list(of_reader) for of_reader in zip(*found, strict=True)]
