import pytest
import torch
from torch import nn

from deepmoe import registry
from deepmoe.config import EmbeddingConfig, HeadsConfig
from deepmoe.errors import UserError
from deepmoe.layers import NoisyTopKHeads
from deepmoe.registry import create_model, list_models, model_entry, register_model


def test_the_zoo_is_complete() -> None:
    vgg = [f"vgg{d}" for d in (11, 13, 16, 19)]
    cifar = [f"resnet{d}" for d in (20, 32, 44, 56, 110)]
    imagenet = [f"resnet{d}" for d in (18, 34, 50, 101)]
    assert sorted(list_models()) == sorted([*vgg, *cifar, *imagenet, "resnet18_cifar", "drn_a_50"])


def test_number_and_widths_of_gates() -> None:
    def widths(name: str, **options: object) -> tuple[int, ...]:
        with torch.device("meta"):
            return create_model(name, **options).gating.widths

    base = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512)
    assert widths("vgg16") == base
    assert widths("vgg16", gate_last=True) == (*base, 512)
    assert widths("vgg16", wide=2) == tuple(2 * w for w in base)
    assert widths("resnet20") == (16,) * 3 + (32,) * 3 + (64,) * 3
    assert widths("resnet20", wide=2) == (32,) * 3 + (64,) * 3 + (128,) * 3
    assert len(widths("resnet50")) == 32
    assert widths("resnet50", block="bottleneck-b", wide=2) == (
        (128,) * 3 + (256,) * 4 + (512,) * 6 + (1024,) * 3
    )
    assert widths("resnet20", widths=list(range(1, 10))) == tuple(range(1, 10))


def test_all_gates_the_residual_stream_too() -> None:
    def gated(name: str, **options: object) -> dict[str, int]:
        with torch.device("meta"):
            gating = create_model(name, **options).gating
        return dict(zip(gating.names, gating.widths, strict=True))

    inner, both = gated("resnet18", wide=2), gated("resnet18", wide=2, gates="all")
    assert inner.items() < both.items()
    # One gate for all that a stage adds up; what the classifier reads has none.
    streams = {"conv1": 64, "layer2.0.conv2": 128, "layer3.0.conv2": 256}
    assert dict(both.items() - inner.items()) == streams
    assert gated("vgg16", gates="all") == gated("vgg16")


def test_named_layers_alone_are_gated() -> None:
    with torch.device("meta"):
        gating = create_model("resnet20", gates=["layer2.0.conv1", "layer1.1.conv1"]).gating
    assert gating.names == ("layer1.1.conv1", "layer2.0.conv1")
    assert gating.widths == (16, 32)


@pytest.mark.slow
def test_every_model_runs_gated_and_dense() -> None:
    for name in list_models():
        with torch.device("meta"):
            model = create_model(name, classes=7)
            dense = create_model(name, classes=7, gates=None)
            x = torch.empty(2, 3, 64, 96)
        shape = (2, 7, 64, 96) if name == "drn_a_50" else (2, 7)
        output = model(x)
        assert output.logits.shape == shape
        assert output.embedding_logits.shape == (2, 7)
        assert [g.shape for g in output.gates] == [(2, w) for w in model.gating.widths]
        twin = dense(x)
        assert twin.logits.shape == shape
        assert twin.embedding_logits is None
        assert twin.gates is None
        assert model.network.state_dict().keys() == dense.network.state_dict().keys()
        assert model.classes == dense.classes == 7


def test_embedding_and_heads_follow_their_configuration() -> None:
    model = create_model(
        "resnet20",
        classes=10,
        embedding=EmbeddingConfig(form="latent", dim=5, widths=(4, 4)),
        heads=HeadsConfig(kind="noisy-topk", share=0.25),
    ).eval()
    assert isinstance(model.heads, NoisyTopKHeads)
    assert model.heads.weight.shape == (sum(model.gating.widths), 5)
    output = model(torch.randn(2, 3, 32, 32))
    assert [(g != 0).sum(dim=1).tolist() for g in output.gates] == (
        [[4, 4]] * 3 + [[8, 8]] * 3 + [[16, 16]] * 3
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create_model("vgg12"), "no model is named 'vgg12'"),
        (lambda: create_model("resnet20", gate_last=True), "no option 'gate_last'"),
        (lambda: create_model("vgg16", widths="w2"), "no widths named 'w2'"),
        (lambda: create_model("vgg11", widths="w13-all"), "no widths named"),
        (lambda: create_model("vgg16", widths=[64] * 12), "13 convolutions, but got 12"),
        (lambda: create_model("resnet20", widths=[16]), "9 inner convolutions, but got 1"),
        (lambda: create_model("resnet20", widths="w13-all"), "only vgg16 has named widths"),
        (lambda: create_model("resnet50", block="bottleneck-c"), "no block is named"),
        (lambda: create_model("resnet50", gates="some"), "inner, all or a list .*'some'"),
        (lambda: create_model("vgg16", gates="some"), "inner, all or a list .*'some'"),
        (lambda: create_model("vgg16", gates=["features.1"]), "is made by 'features.1'"),
        (lambda: create_model("resnet20", gates=["fc"]), "fc makes can't be gated: it is the"),
        (lambda: create_model("vgg16", classes=0), "from 2 to"),
    ],
)
def test_mistakes_are_named(call, message) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        call()


@pytest.mark.parametrize(
    "options",
    [
        {"wide": 0},
        {"wide": -2},
        {"wide": float("nan")},
        {"widths": [-1] * 9},
        {"widths": [16] * 8 + [0]},
        {"wide": 1e30},
    ],
    ids=str,
)
def test_widths_out_of_range_are_refused(options: dict) -> None:
    with torch.device("meta"), pytest.raises(UserError, match="out of range"):
        create_model("resnet20", **options)


def test_registering_a_model(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))

    @register_model("tiny", input_size=(8, 8), classes=3, embedding_widths=(4,))
    def tiny(classes: int, *, wide: float = 1.0):
        return create_model("resnet20", classes=classes, wide=wide, gates=None).network

    assert "tiny" in list_models()
    assert create_model("tiny", wide=2)(torch.randn(2, 3, 8, 8)).logits.shape == (2, 3)
    with pytest.raises(ValueError, match="registered already"):
        register_model("tiny")(tiny)


def test_any_module_can_be_registered_with_gates_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))

    @register_model("plain", inner=lambda network, *, both=False: ["0", "2"][: 1 + both])
    def plain(classes: int, *, width: int = 6):
        layers = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 5, 3), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, classes))

    assert model_entry("plain").options == ["width", "both"]
    assert create_model("plain").gating.widths == (6,)
    model = create_model("plain", classes=4, width=7, both=True)
    assert model.gating.names == ("0", "2") and model.gating.widths == (7, 5)
    assert model(torch.randn(2, 3, 32, 32)).logits.shape == (2, 4)
