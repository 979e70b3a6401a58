import io

import pytest
import torch
from torch import Tensor, nn

from deepmoe.building import gate
from deepmoe.config import EmbeddingConfig
from deepmoe.deploy import CodedNetwork, ExitingNetwork, static_network
from deepmoe.errors import UserError
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE, confidence
from deepmoe.registry import create_model


def model_with_codes(codes: int) -> tuple[DeepMoE, Tensor]:
    """A model whose codes are the routes of some images, and these images."""
    torch.manual_seed(0)
    model = create_model("vgg11", classes=10, wide=0.25).eval()
    torch.nn.init.normal_(model.heads.weight)
    torch.nn.init.normal_(model.embedding.project.weight, std=10.0)  # so that images differ
    images = torch.randn(codes, 3, 32, 32)
    with torch.no_grad():
        routes = torch.cat(model.heads(model.embedding(images)[0]), dim=1)
    model.codebook = RouteCodebook(routes, torch.ones(routes.shape[1]), model.gating.widths)
    return model, images


def three_convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


@torch.no_grad()
def model_with_exits(codes: int | None = None) -> tuple[DeepMoE, Tensor]:
    """A model whose embedding answers about half of some images, with codes or without gates."""
    torch.manual_seed(0)
    images = torch.randn(6, 3, 16, 16)
    look = EmbeddingConfig(form="latent", dim=4, widths=(4, 8))
    model = gate(three_convolutions(), images, embedding=look).eval()
    nn.init.normal_(model.embedding.project.weight, std=10.0)  # so that images differ
    nn.init.normal_(model.heads.weight)
    if codes is None:
        model = DeepMoE(model.embedding, None, model.network, model.gating).eval()
    else:
        routes = torch.cat(model.heads(model.embedding(images[:codes])[0]), dim=1)
        model.codebook = RouteCodebook(routes, torch.ones(routes.shape[1]), model.gating.widths)
    model.exit_at = confidence(model(images).embedding_logits).median() + 1e-4
    model.exit_vote = None if codes is None else torch.tensor(0.2)
    assert 0 < model(images).exited.sum() < len(images)
    return model, images


@pytest.mark.parametrize("lower", ["half", "bfloat16"])
@torch.no_grad()
def test_a_network_with_exits_keeps_its_threshold_in_half_precision(lower: str) -> None:
    """Rounded to 8 bits, 0.9871 would be 0.9883: fewer images would exit."""
    model, images = model_with_exits(2)
    model.exit_at, model.exit_vote = torch.tensor(0.9871), torch.tensor(0.15)
    network = getattr(ExitingNetwork(model), lower)()
    assert network.exit_at == torch.tensor(0.9871) and network.exit_vote == torch.tensor(0.15)
    assert ExitingNetwork(getattr(model, lower)()).exit_at == torch.tensor(0.9871)
    (dtype,) = {p.dtype for p in network.parameters()}
    assert network(images[:1].to(dtype)).dtype == dtype


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("where", ["inner", "all"])
@torch.no_grad()
def test_a_static_network_gives_what_its_route_gives(where: str) -> None:
    torch.manual_seed(0)
    model = create_model("resnet20", classes=10, gates=where).eval()
    torch.nn.init.normal_(model.heads.weight)
    x = torch.randn(1, 3, 32, 32)
    output = model(x)
    network = static_network(model, torch.cat(output.gates, dim=1)[0])
    assert error(network(x), output.logits) <= 1e-5
    own = sum(p.numel() for p in network.parameters())
    assert own < 0.8 * sum(p.numel() for p in model.network.parameters())
    assert not {p.data_ptr() for p in network.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }


@torch.no_grad()
def test_a_route_without_any_channel_still_answers() -> None:
    model = create_model("resnet20", classes=10).eval()
    x = torch.randn(2, 3, 32, 32)
    closed = torch.zeros(sum(model.gating.widths))
    network = static_network(model, closed)
    gates = [g.expand(2, -1) for g in closed.split(model.gating.widths)]
    assert error(network(x), model.gating(model.network, x, gates)) <= 1e-5


@torch.no_grad()
def test_a_coded_network_runs_the_network_of_the_images_code() -> None:
    model, images = model_with_codes(5)
    network = CodedNetwork(model)
    assert len({float(model(x).logits.sum()) for x in images.split(1)}) == 5
    for x in images.split(1):
        assert error(network(x), model(x).logits) <= 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_a_coded_network_survives_export_and_a_file() -> None:
    model, images = model_with_codes(2)
    exported, file = torch.export.export(CodedNetwork(model), (images[:1],)), io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for x in images.split(1):
        assert error(loaded(x), model(x).logits) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("codes", [None, 1, 2])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_exits_survive_export_to_both_forms(codes: int | None, tmp_path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    runtime.set_default_logger_severity(3)
    model, images = model_with_exits(codes)
    network, expected = ExitingNetwork(model), model(images).logits
    exported = torch.export.export(network, (images[:1],))
    torch.onnx.export(exported, (), tmp_path / "exits.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "exits.onnx")

    def by_onnx(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])

    torch.export.save(exported, tmp_path / "exits.pt2")
    loaded = torch.export.load(tmp_path / "exits.pt2").module()
    for run in (network, exported.module(), loaded, by_onnx):
        found = torch.cat([run(x) for x in images.split(1)])
        assert error(found, expected) <= 1e-5
    # No gradients, also where nobody has switched them off: tracing these takes seconds an image.
    with torch.enable_grad():
        assert not loaded(images[:1]).requires_grad and not network(images[:1]).requires_grad
    assert next(model.parameters()).requires_grad
    # What a sure embedding saves is saved: convolutions stand in the other branch alone.
    top = exported.graph_module
    assert convolutions(top) == len(model.embedding.convs)
    assert convolutions(top.true_graph_0) == 0


def convolutions(module: torch.fx.GraphModule) -> int:
    return sum("conv2d" in str(node.target) for node in module.graph.nodes)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_gives_what_a_gated_model_gives(tmp_path) -> None:
    """All channels of it; files with the savings in them are those of `deepmoe export`."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    runtime.set_default_logger_severity(3)
    model, images = create_model("vgg11", classes=10, wide=0.25).eval(), torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(model.heads.weight)
    path = tmp_path / "masked.onnx"
    torch.onnx.export(model, (images[:1],), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    for x in images.split(1):
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert error(torch.from_numpy(found), model(x).logits) <= 1e-5


def test_a_network_of_ones_own_is_handed_over(tmp_path) -> None:
    torch.manual_seed(0)
    network = three_convolutions()
    x = torch.randn(2, 3, 16, 16)
    model = gate(network, x).eval()
    route = torch.rand(sum(model.gating.widths)).sub(0.5).relu()
    small = static_network(model, route)
    gates = [g.expand(2, -1) for g in route.split(model.gating.widths)]
    with torch.no_grad():
        assert error(small(x), model.gating(network, x, gates)) <= 1e-5
        exported = torch.export.export(small, (x,))
        assert error(exported.module()(x), small(x)) <= 1e-5


def test_mistakes_are_named() -> None:
    model = create_model("resnet20", classes=10)
    with pytest.raises(UserError, match="no codebook"):
        CodedNetwork(model)
    with pytest.raises(UserError, match="takes a model with exits"):
        ExitingNetwork(model)
    model.exit_at = torch.tensor(0.9)
    with pytest.raises(UserError, match=r"train it with train\.codes"):
        ExitingNetwork(model)
    with pytest.raises(UserError, match="gates side by side"):
        static_network(model, torch.ones(3))
    with pytest.raises(UserError, match="one image at a time"):
        CodedNetwork(model_with_codes(2)[0])(torch.randn(2, 3, 32, 32))
