"""Batched changes of colour against one image at a time."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from deepmoe.data.color import jitter, random_jitter, random_lighting, to_grey


def change(image_CHW: Tensor, kind: int, factor: float) -> Tensor:
    """One change of one image, as fb.resnet.torch writes it."""
    red, green, blue = image_CHW
    grey = (0.299 * red + 0.587 * green + 0.114 * blue).expand(3, -1, -1)
    other = (torch.zeros_like(image_CHW), grey.mean().expand_as(grey), grey)[kind]
    return factor * image_CHW + (1 - factor) * other


def batch(count: int = 6) -> Tensor:
    return torch.randint(256, (count, 3, 5, 7), dtype=torch.uint8)


ORDERS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("as_float", [False, True])
def test_jitter_equals_three_changes_of_each_image_in_any_order(as_float: bool) -> None:
    images = batch().float() if as_float else batch()
    before = images.clone()
    factors = 0.4 + torch.rand(6, 3)
    changed = jitter(images, factors)
    for image, own_factors, order, result in zip(images, factors, ORDERS, changed, strict=True):
        expected = image.double()
        for kind in order:
            expected = change(expected, kind, float(own_factors[kind]))
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-3)
    assert torch.equal(images, before)


def test_factors_of_one_change_nothing_and_zero_saturation_is_grey() -> None:
    images = batch()
    torch.testing.assert_close(jitter(images, torch.ones(6, 3)), images.float())
    grey = jitter(images, torch.tensor([[1.0, 1.0, 0.0]]).expand(6, -1))
    torch.testing.assert_close(grey, to_grey(images.float()).expand(-1, 3, -1, -1))


def test_random_jitter_draws_factors_evenly_from_the_range() -> None:
    # White images have no contrast or saturation to change, so only brightness shows.
    white = torch.full((2000, 3, 1, 1), 255, dtype=torch.uint8)
    changed = random_jitter(white, 0.4, torch.Generator().manual_seed(1)) / 255
    assert 0.6 - 1e-5 <= changed.min() < 0.61
    assert 1.39 < changed.max() <= 1.4 + 1e-5
    assert changed.mean() == pytest.approx(1.0, abs=0.02)


def test_random_jitter_gives_every_image_its_own_change_and_repeats_with_its_seed() -> None:
    image = batch(1).expand(50, -1, -1, -1)
    first = random_jitter(image, 0.4, torch.Generator().manual_seed(1))
    again = random_jitter(image, 0.4, torch.Generator().manual_seed(1))
    other = random_jitter(image, 0.4, torch.Generator().manual_seed(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.flatten(1).unique(dim=0)) == 50


def test_lighting_has_the_covariance_of_imagenet_colours() -> None:
    shifts = random_lighting(20000, 0.1, torch.Generator().manual_seed(1))
    assert shifts.shape == (20000, 3, 1, 1)
    found = np.cov(shifts.flatten(1).double().numpy().T)
    vectors = np.array(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )
    expected = vectors @ np.diag(np.square([0.2175, 0.0188, 0.0045]) * (0.1 * 255) ** 2) @ vectors.T
    np.testing.assert_allclose(found, expected, rtol=0.03)
    values = np.sort(np.linalg.eigvalsh(found))  # the two small ones hardly show in `found` itself
    np.testing.assert_allclose(np.sqrt(values) / 25.5, [0.0045, 0.0188, 0.2175], rtol=0.03)


def test_lighting_of_strength_zero_is_nothing() -> None:
    assert not random_lighting(4, 0.0, torch.Generator()).any()
