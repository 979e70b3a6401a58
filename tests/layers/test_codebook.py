import pytest
import torch
from helpers import random_gates

from deepmoe.config import EmbeddingConfig
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.registry import create_model

WIDTHS = [4, 7, 3]


def make_codebook(codes: int = 6, widths: list[int] = WIDTHS) -> RouteCodebook:
    routes = torch.cat(random_gates(widths, codes), dim=1)
    return RouteCodebook(routes, torch.rand(sum(widths)) + 0.1, widths)


def model_with_codes() -> DeepMoE:
    model = create_model("resnet20", classes=10, embedding=EmbeddingConfig(widths=(8, 8)))
    torch.nn.init.normal_(model.heads.weight)
    return model.with_gates(codebook=make_codebook(5, model.heads.widths))


def distance(gates: list[float], code: list[float], weight: list[float], scale: list[float]):
    total = 0.0
    for g, k, w, s in zip(gates, code, weight, scale, strict=True):
        total += w * (((g > 0) - (k > 0)) ** 2 + (g / s - k / s) ** 2)
    return total


def test_the_nearest_code_is_that_of_a_plain_loop() -> None:
    codebook = make_codebook()
    scale = []
    for layer, width in zip(codebook.codes.split(WIDTHS, dim=1), WIDTHS, strict=True):
        scale += [layer[layer > 0].mean().item()] * width
    gates = tuple(random_gates(WIDTHS, 50))
    codes, weight = codebook.codes.tolist(), codebook.weight.tolist()
    for row, found in zip(torch.cat(gates, dim=1).tolist(), codebook.nearest(gates), strict=True):
        distances = [distance(row, code, weight, scale) for code in codes]
        assert found == distances.index(min(distances))
    assert len(codebook.nearest(gates).unique()) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gates_become_those_of_a_code_in_their_own_precision(dtype: torch.dtype) -> None:
    codebook = make_codebook()
    gates = tuple(g.to(dtype).requires_grad_() for g in random_gates(WIDTHS, 9))
    replaced = codebook(gates)
    assert [g.shape for g in replaced] == [(9, w) for w in WIDTHS]
    assert all(g.dtype == dtype and not g.requires_grad for g in replaced)
    expected = codebook.codes[codebook.nearest(gates)].to(dtype)
    assert torch.equal(torch.cat(replaced, dim=1), expected)


def test_a_code_is_its_own_nearest_and_the_first_of_equals() -> None:
    codebook = make_codebook()
    assert codebook.nearest(codebook.codes.split(WIDTHS, dim=1)).tolist() == list(range(6))
    twice = RouteCodebook(codebook.codes.repeat(2, 1), codebook.weight, WIDTHS)
    assert twice.nearest(codebook.codes.split(WIDTHS, dim=1)).tolist() == list(range(6))


def test_a_layer_without_positive_codes_has_scale_one() -> None:
    codes = torch.zeros(2, 14)
    codes[0, :4] = 3.0
    codebook = RouteCodebook(codes, torch.ones(14), WIDTHS)
    assert codebook.scale.tolist() == [3.0] * 4 + [1.0] * 10
    assert codebook.nearest(tuple(torch.zeros(1, w) for w in WIDTHS)).tolist() == [1]


def test_codes_are_chosen_in_full_precision_under_autocast() -> None:
    codebook = make_codebook(codes=100)
    gates = tuple(random_gates(WIDTHS, 500))
    with torch.autocast("cpu", torch.bfloat16):
        inside = codebook.nearest(gates)
    assert torch.equal(inside, codebook.nearest(gates))


def test_loaded_codes_are_the_ones_compared_with() -> None:
    one, other = make_codebook(), make_codebook()
    gates = tuple(random_gates(WIDTHS, 50))
    assert set(one.state_dict()) == {"codes", "weight"}
    assert not torch.equal(one.nearest(gates), other.nearest(gates))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.nearest(gates), other.nearest(gates))


@pytest.mark.parametrize(
    ("codes", "weight", "message"),
    [
        (torch.ones(2, 13), torch.ones(14), "codes must be rows of 14"),
        (torch.ones(0, 14), torch.ones(14), "codes must be rows of 14"),
        (torch.ones(14), torch.ones(14), "codes must be rows of 14"),
        (torch.ones(2, 14), torch.ones(13), "weight must hold 14"),
    ],
)
def test_shapes_that_do_not_fit_are_named(codes, weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouteCodebook(codes, weight, WIDTHS)


def test_a_model_runs_on_its_codes_and_compiles_with_them() -> None:
    model = model_with_codes()
    x = torch.randn(8, 3, 16, 16)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(x)
    codes = {tuple(code) for code in model.codebook.codes.tolist()}
    assert {tuple(route) for route in torch.cat(output.gates, dim=1).tolist()} <= codes
    output.logits.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.network.parameters())
    assert model.heads.weight.grad is None  # codes come from no head
    model.eval()
    torch.testing.assert_close(compiled(x).logits, model(x).logits, atol=1e-5, rtol=1e-5)


def test_a_model_with_codes_is_exported() -> None:
    model = model_with_codes().eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    example = torch.randn(2, 3, 16, 16)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 3, 16, 16)
    output = program.module()(x)
    assert isinstance(output, DeepMoEOutput)
    torch.testing.assert_close(output.logits, model(x).logits, atol=1e-5, rtol=1e-5)


def test_a_codebook_needs_gates() -> None:
    model = model_with_codes()
    with pytest.raises(ValueError, match="a codebook needs gates"):
        DeepMoE(None, None, model.network, model.gating, make_codebook())
