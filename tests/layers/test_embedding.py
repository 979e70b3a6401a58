import pytest
import torch
import torch.nn.functional as F
from helpers import counted_macs

from deepmoe.errors import UserError
from deepmoe.layers import ShallowEmbedding
from deepmoe.layers.embedding import CIFAR_WIDTHS, IMAGENET_WIDTHS


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
