import pytest
import torch
import torch.nn.functional as F
from helpers import counted_macs, randomise_statistics

from deepmoe.config import EmbeddingConfig
from deepmoe.configured_models import config_of
from deepmoe.errors import UserError
from deepmoe.layers import ShallowEmbedding
from deepmoe.layers.embedding import CIFAR_WIDTHS, IMAGENET_WIDTHS
from deepmoe.registry import create_model
from deepmoe.sparse.embedding import fast_embedding
from deepmoe.sparse.planner import Planner


@pytest.mark.parametrize("form", ["classes", "latent"])
def test_mixture_weights_lie_on_the_simplex(form: str) -> None:
    embedding = ShallowEmbedding(10, form=form, dim=6, widths=(8, 8))
    e, logits = embedding(torch.randn(5, 3, 16, 16))
    assert e.shape == (5, 10 if form == "classes" else 6)
    assert logits.shape == (5, 10)
    assert (e >= 0).all()
    torch.testing.assert_close(e.sum(dim=1), torch.ones(5))


def test_classes_form_is_the_softmax_of_its_logits() -> None:
    embedding = ShallowEmbedding(7, widths=(8,)).eval()
    e, logits = embedding(torch.randn(3, 3, 8, 8))
    torch.testing.assert_close(e, logits.softmax(dim=1))


def test_latent_form_classifies_from_the_mixture_weights_alone() -> None:
    embedding = ShallowEmbedding(7, form="latent", dim=4, widths=(8,)).eval()
    e, logits = embedding(torch.randn(3, 3, 8, 8))
    torch.testing.assert_close(logits, embedding.classifier(e))


@pytest.mark.parametrize(
    ("widths", "side"), [(CIFAR_WIDTHS, 32), (IMAGENET_WIDTHS, 224), ((5, 7), 13)]
)
@pytest.mark.parametrize("form", ["classes", "latent"])
def test_it_costs_what_pytorch_counts(form: str, widths: tuple, side: int) -> None:
    embedding = ShallowEmbedding(100, form=form, widths=widths)
    assert embedding.macs(side, side) == counted_macs(embedding, torch.randn(1, 3, side, side))
    oblong = torch.randn(2, 3, side, side + 3)
    assert embedding.macs(side, side + 3) == counted_macs(embedding, oblong) / 2


def test_cifar_widths_cost_what_the_paper_implies() -> None:
    embedding = ShallowEmbedding(100)
    of_convs = embedding.macs(32, 32) - embedding.project.weight.numel()
    assert of_convs == counted_macs(embedding.convs, torch.randn(1, 3, 32, 32)) == 5160960


@pytest.mark.parametrize("form", ["classes", "latent"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(form: str, dtype: torch.dtype) -> None:
    embedding = ShallowEmbedding(5, form=form, dim=4, widths=(6,)).to(dtype)
    e, logits = embedding(torch.randn(3, 3, 8, 8).to(dtype))
    assert e.dtype == torch.promote_types(dtype, torch.float32)
    assert logits.dtype == dtype


@pytest.mark.parametrize(
    "options",
    [{"form": "other"}, {"widths": ()}, {"widths": (8, 0)}],
)
def test_bad_options_are_named(options: dict) -> None:
    with pytest.raises(UserError):
        ShallowEmbedding(10, **options)


def test_latent_form_learns_to_classify() -> None:
    torch.manual_seed(0)
    embedding = ShallowEmbedding(4, form="latent", dim=32, widths=(8, 8))
    x, labels = torch.randn(64, 3, 8, 8), torch.arange(4).repeat(16)
    x += labels[:, None, None, None]
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(embedding(x)[1], labels).backward()
        optimizer.step()
    assert F.cross_entropy(embedding(x)[1], labels) < 0.5  # 1.39 by chance


@pytest.mark.parametrize("form", ["classes", "latent"])
@pytest.mark.parametrize("task_gradient", [True, False])
def test_the_task_teaches_the_embedding_or_not(form: str, task_gradient: bool) -> None:
    embedding = ShallowEmbedding(4, form=form, widths=(8,), task_gradient=task_gradient)
    e, logits = embedding(torch.randn(8, 3, 8, 8))
    assert e.requires_grad == task_gradient
    logits.square().sum().backward()  # its own loss always does
    assert embedding.project.weight.grad.abs().sum() > 0


@torch.no_grad()
@pytest.mark.parametrize(("shrink", "side"), [(2, 16), (2, 15), (3, 16), (4, 3)])
@pytest.mark.parametrize("form", ["classes", "latent"])
def test_it_may_look_at_means_of_pixels(form: str, shrink: int, side: int) -> None:
    shrunk = ShallowEmbedding(5, form=form, dim=4, widths=(6, 8), shrink=shrink)
    randomise_statistics(shrunk.eval())
    plain = ShallowEmbedding(5, form=form, dim=4, widths=(6, 8)).eval()
    plain.load_state_dict(shrunk.state_dict())
    x = torch.randn(3, 3, side, side + 2)
    # What is left over at the right and at the bottom has a mean of its own.
    rows = torch.stack([r.mean(dim=2) for r in x.split(shrink, dim=2)], dim=2)
    small = torch.stack([c.mean(dim=3) for c in rows.split(shrink, dim=3)], dim=3)
    for found, expected in zip(shrunk(x), plain(small), strict=True):
        torch.testing.assert_close(found, expected)
    height, width = -(-side // shrink), -(-(side + 2) // shrink)
    assert shrunk.macs(side, side + 2) == plain.macs(height, width)
    assert shrunk.macs(side, side + 2) == counted_macs(shrunk, x[:1])
    fast = fast_embedding(shrunk, torch.float32, Planner(()))
    for found, expected in zip(fast(x), shrunk(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_is_made_with_it_and_saved_with_it() -> None:
    shrunk = EmbeddingConfig(widths=(4, 8), shrink=2)
    model = create_model("resnet20", classes=5, widths=[4] * 9, embedding=shrunk)
    assert model.embedding.shrink == 2
    assert config_of(model).embedding == shrunk
    assert create_model("resnet20", classes=5, widths=[4] * 9).embedding.shrink == 1
