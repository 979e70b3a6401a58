"""Answers of an embedding and of its network, as a test likes them."""

import torch
from torch import Tensor

from deepmoe.evaluation import Answers


def answers(
    sure: Tensor | list[float],
    early: Tensor | list[bool],
    right: Tensor | list[bool],
    macs: Tensor | list[int] | None = None,
    joint: list[bool] | None = None,
    **options: int,
) -> Answers:
    """Made-up answers; with so many classes that an embedding is soon better than chance."""
    sure, early, right = (torch.as_tensor(values) for values in (sure, early, right))
    macs = torch.full((len(right),), 100) if macs is None else torch.as_tensor(macs)
    costs = {"embedding_macs": 10, "dense_macs": 90, "classes": 10_000, **options}
    nothing = torch.zeros(len(right))
    return Answers(
        confidence=sure,
        early_right=early,
        right=right,
        joint_right=right if joint is None else torch.as_tensor(joint),
        early_loss=nothing,
        loss=nothing,
        joint_loss=nothing,
        vote=0.0 if joint is None else 0.5,
        active=nothing,
        macs=macs,
        macs_without=macs - 10,
        **costs,
    )
