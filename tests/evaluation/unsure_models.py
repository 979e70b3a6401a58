"""Models whose embedding answers some images."""

import torch
from torch import nn

from deepmoe.config import EmbeddingConfig
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model


def unsure(gates: str | None, dtype: torch.dtype = torch.float32) -> DeepMoE:
    """A model whose embedding is sure of some images, and not of others."""
    torch.manual_seed(0)
    model = create_model(
        "resnet20",
        classes=10,
        widths=[4] * 9,
        gates=gates,
        exits=True,
        embedding=EmbeddingConfig(widths=(4, 8)),
    ).eval()
    nn.init.normal_(model.embedding.project.weight, std=5.0)
    if model.heads is not None:
        nn.init.normal_(model.heads.weight)
    return model.to(dtype)
