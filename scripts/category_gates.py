"""Gates of other classes, where gates say the category of an image, but not its class.

    python scripts/category_gates.py apart_last --seed 0 --data PATH

Trains a run of experiments/shuffle_small with an embedding that has a mixture weight for each
category of CIFAR-100, and learns these. Adds a line to the experiment's shuffling.jsonl, where the
network is called categories_last.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from shuffled_gates import GRID, add_line, shuffled_gates
from torch import Tensor, nn
from torch.utils.data import Dataset

from deepmoe.compare.method import changed
from deepmoe.config import RunConfig
from deepmoe.data import DataInfo, DataSource, open_data
from deepmoe.data.augment import look_at, random_views
from deepmoe.data.cifar import read_cifar
from deepmoe.data.coarse_groups import coarse_groups
from deepmoe.data.split import Split
from deepmoe.devices import choose_device
from deepmoe.evaluation.batches import batches_for
from deepmoe.model import DeepMoE
from deepmoe.sweep import read_grid
from deepmoe.training.fit import fit
from deepmoe.training.model_and_optimizer import make_model

SHARPNESS = 20.0  # logit of a class whose category has all of the mixture weight


def places_of(categories: Sequence[str]) -> Tensor:
    """Of each class, the number of its category; (classes,)."""
    names = sorted(set(categories))
    return torch.tensor([names.index(name) for name in categories])


class CategoryClassifier(nn.Module):
    """From a mixture weight for each category to logits of the classes; learns nothing.

    By the classes' cross-entropy, the weights then learn categories: classes of one are alike.
    """

    def __init__(self, categories: Sequence[str]) -> None:
        super().__init__()
        weight_CD = SHARPNESS * F.one_hot(places_of(categories)).float()
        # Buffers, which no optimizer sees, under the names of a linear layer's parameters: the
        # checkpoint is one of an ordinary latent embedding.
        self.register_buffer("weight", weight_CD)
        self.register_buffer("bias", torch.zeros(len(categories)))

    def forward(self, e_BD: Tensor) -> Tensor:
        """Logits of the classes."""
        return F.linear(e_BD, self.weight, self.bias)


class Images(Dataset[tuple[Tensor, int]]):
    """Normalised images, each in a new view every time if they are to be learned from."""

    def __init__(self, split: Split, info: DataInfo, config: RunConfig, *, learned: bool) -> None:
        self.split, self.info, self.data, self.learned = split, info, config.data, learned
        self.generator = torch.Generator().manual_seed(config.train.seed)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """A batch at once, which a loader asks for where it can."""
        x_BCHW = self.split.images[indices]
        if self.learned:
            padding = self.data.crop_padding
            views = random_views(len(indices), padding, self.data.mirror, self.generator)
            x_BCHW = look_at(x_BCHW, views, padding)
        return list(
            zip(self.info.normalise(x_BCHW), self.split.labels[indices].tolist(), strict=True)
        )


def trained(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Trains the run with an embedding of categories, shuffles its gates, and tells the figures."""
    source = open_data(config.data, batch_size=config.train.batch_size)
    categories = coarse_groups(source.info.class_names)
    assert categories is not None, "CIFAR-100 has categories"
    latent = {"embedding.form": "latent", "embedding.dim": len(set(categories))}
    config = changed(config, {**latent, "data.workers": 0})
    model = make_model(config, source.info, choose_device())
    model.embedding.classifier = CategoryClassifier(categories)
    train, test, _ = read_cifar(config.data.root, config.data.name)
    images, checked = (
        Images(split, source.info, config, learned=split is train) for split in (train, test)
    )
    fit(model, images, checked, config, folder, info=source.info)
    figures = shuffled_gates(model, source)
    figures["evaluation"]["embedding_accuracy"] = category_accuracy(model, source, categories)
    return figures


@torch.no_grad()
def category_accuracy(model: DeepMoE, source: DataSource, categories: Sequence[str]) -> float:
    """For how many of the evaluation images the embedding is right about the category."""
    place_of_class, right = places_of(categories), []
    for x_BCHW, labels_B in batches_for(model, source.evaluation):
        e_BD, _ = model.embedding(x_BCHW)
        right.append(e_BD.argmax(dim=1).cpu() == place_of_class[labels_B.cpu()])
    return torch.cat(right).double().mean().item()


def main() -> None:
    """Trains one run, and writes down its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="name of a run in experiments/shuffle_small/grid.toml: apart_*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="data", help="folder of CIFAR-100")
    asked = parser.parse_args()
    run = next(run for run in read_grid(GRID).runs if run.group == asked.run)
    config = changed(run.config, {"data.root": asked.data, "train.seed": asked.seed})
    with tempfile.TemporaryDirectory() as folder:
        figures = trained(config, Path(folder) / "run")
    network = asked.run.replace("apart", "categories")
    command = f"python scripts/category_gates.py {asked.run} --seed {asked.seed}"
    add_line(network, figures, command=command, seed=asked.seed)


if __name__ == "__main__":
    main()
