"""What layers read and give at a few random positions: what `he` and `thinet` are computed from.

Nothing is kept but rows of numbers for these positions, and of those only one batch's at a time.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from deepmoe.compare.readers import Reader
from deepmoe.compare.task import PruningTask
from deepmoe.costs import as_pair
from deepmoe.data import derive_seed
from deepmoe.errors import UserError
from deepmoe.evaluation.batches import batches_for
from deepmoe.graph import evaluation_mode

POSITIONS = 10  # an image
MOST_BYTES = 2**30  # of images, which are held while layers take their turns
BATCH_PIXELS = 2**18  # 256 images of CIFAR's size
LEAST_BATCH = 8
CHECKED = 64  # rows of a batch
TOLERANCE = 0.02  # of the largest output; convolutions on a GPU may round to 10 bits


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows (S) of one layer in one network: an image and a position each.

    Attributes:
        x_SCK: what the layer reads, at the places of its kernel.
        y_SO: what it gives, less its bias.
        shortcut_SO: what is added to that behind the norm, where something is.
    """

    x_SCK: Tensor
    y_SO: Tensor
    shortcut_SO: Tensor | None


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


def samples(
    task: PruningTask,
    readers: Sequence[Reader],
    images: Sequence[Tensor],
    networks: Sequence[nn.Module],
    *seeds: int,
) -> Iterator[list[list[Sample]]]:
    """For each batch of images, samples of each reader in each network, at the same positions.

    Args:
        task: of the networks.
        readers: the layers.
        images: in batches.
        networks: the task's, or with other weights.
        seeds: of the positions, with the task's.
    """
    generator = torch.Generator().manual_seed(derive_seed(task.seed, *seeds))
    for x_BCHW in images:
        positions: dict[Reader, Tensor] = {}
        found = []
        for network in networks:
            pass_ = _Pass(task.gating.graph.program, network, readers, positions, generator)
            found.append(pass_.samples(task.model.as_input(x_BCHW)))
        yield [list(of_reader) for of_reader in zip(*found, strict=True)]


class _Pass(fx.Interpreter):
    """One batch through a network, up to the last thing that readers tell of."""

    def __init__(
        self,
        program: fx.Graph,
        network: nn.Module,
        readers: Sequence[Reader],
        positions: dict[Reader, Tensor],
        generator: torch.Generator,
    ) -> None:
        super().__init__(network, graph=program)
        self.extra_traceback = False  # leaving early is no error to be told
        self.network, self.readers = network, readers
        self.positions, self.generator = positions, generator
        self.read: dict[Reader, tuple[Tensor, Tensor]] = {}
        self.shapes: dict[Reader, torch.Size] = {}
        self.met: dict[Reader, Tensor | None] = {}

    def samples(self, x_BCHW: Tensor) -> list[Sample]:
        with evaluation_mode(self.network), contextlib.suppress(_AllSeen):
            self.run(x_BCHW)
        return [Sample(*self.read[reader], self.met[reader]) for reader in self.readers]

    def run_node(self, n: fx.Node) -> object:
        # An addition may work in place: what it adds is looked at before.
        for reader in self.readers:
            if reader.addition is n:
                assert reader.shortcut is not None
                self._meet(reader, self.env[reader.shortcut])
        value = super().run_node(n)
        for reader in self.readers:
            if reader.layer.node == n.name:
                assert isinstance(n.args[0], fx.Node)
                self._read(reader, self.env[n.args[0]], value)
        if len(self.met) == len(self.readers):
            raise _AllSeen
        return value

    def _read(self, reader: Reader, x: Tensor, y: Tensor) -> None:
        module = self.network.get_submodule(reader.path)
        if reader not in self.positions:
            places = y[0].numel() // len(reader.layer.outs)
            drawn = torch.rand(len(y), places, generator=self.generator).argsort(dim=1)
            self.positions[reader] = drawn[:, :POSITIONS].to(y.device)
        at_BP = self.positions[reader]
        if isinstance(module, nn.Conv2d):
            x_SCK, y_SO = _patches(module, x, at_BP, y.shape[3]), _rows(y, at_BP)
        else:
            x_SCK, y_SO = _rows(x.movedim(-1, 1), at_BP)[..., None], _rows(y.movedim(-1, 1), at_BP)
        if isinstance(module.bias, Tensor):
            y_SO = y_SO - module.bias
        weight = reader.weight(self.network).flatten(1)
        expected, given = x_SCK[:CHECKED].flatten(1) @ weight.T, y_SO[:CHECKED]
        if bool((expected - given).abs().max() > TOLERANCE * given.abs().max()):
            raise UserError(f"{reader.path} is more than a plain layer: this method can't refit it")
        self.read[reader] = x_SCK, y_SO
        self.shapes[reader] = y.shape
        if reader.addition is None:
            self.met[reader] = None

    def _meet(self, reader: Reader, value: Tensor) -> None:
        self.met[reader] = None
        if value.shape == self.shapes[reader]:  # else it is spread, which no weight can mend
            value = value if reader.layer.is_conv else value.movedim(-1, 1)
            self.met[reader] = _rows(value, self.positions[reader])


class _AllSeen(Exception):
    """There is nothing left to look at."""


def _rows(value: Tensor, at_BP: Tensor) -> Tensor:
    """Channels, which lie along dimension 1, at some positions of each image."""
    value = value.flatten(2) if value.dim() > 2 else value[..., None]
    rows = value.gather(2, at_BP[:, None].expand(-1, value.shape[1], -1))
    return rows.movedim(2, 1).flatten(0, 1)


def _patches(conv: nn.Conv2d, x_BCHW: Tensor, at_BP: Tensor, columns: int) -> Tensor:
    """What a convolution reads at some positions: one by one, as all would be k * k images."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x_BCHW, conv._reversed_padding_repeated_twice, mode=mode)
    down, across = (
        torch.arange(k, device=x.device) * d
        for k, d in zip(conv.kernel_size, conv.dilation, strict=True)
    )
    top, left = at_BP // columns * conv.stride[0], at_BP % columns * conv.stride[1]
    rows = top[..., None, None] + down[:, None]
    cols = left[..., None, None] + across
    image = torch.arange(len(x), device=x.device)[:, None, None, None]
    patches = x.movedim(1, 3)[image, rows, cols]  # (B, P, k, k, C)
    return patches.flatten(2, 3).movedim(3, 2).flatten(0, 1)
