"""The sparse engine against the masked-dense model, every way of it."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import random_gates, randomise_statistics
from torch import Tensor

from deepmoe.errors import UserError
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE
from deepmoe.random_routes import set_routes
from deepmoe.registry import create_model, list_models
from deepmoe.sparse import Plan, SparseModel, convolution, sparsify
from deepmoe.sparse.folding import fold
from deepmoe.sparse.planner import TRIALS
from deepmoe.sparse.route_groups import in_order
from deepmoe.sparse.translation import translate

SINGLE, HALF = 1e-4, 2e-2  # relative errors allowed
SETTLED = 16  # runs after which every way of every layer has been tried

# For the rest of the zoo, a size that goes through all of its strides, and is odd where it can be.
SMALLEST = {"vgg": (33, 47), "resnet": (29, 31), "drn": (33, 41)}
OPTIONS = [
    ("vgg16", {"widths": [8, 8, 16, 16, 20, 20, 20, 24, 24, 24, 24, 24, 24]}),
    ("vgg11", {"wide": 0.25, "gate_last": True}),
    ("resnet20", {"gates": "all", "wide": 2}),
    ("resnet18_cifar", {"gates": "all", "classes": 5}),
    ("resnet18", {"gates": "all", "classes": 5}),
    ("resnet50", {"block": "bottleneck-b", "wide": 0.5, "gates": "all", "classes": 5}),
    ("drn_a_50", {"block": "bottleneck-a", "wide": 0.5, "classes": 5}),
]


def make(name: str, **options: object) -> DeepMoE:
    torch.manual_seed(0)
    model = create_model(name, **options).eval()
    randomise_statistics(model)
    return model


def size_of(name: str) -> tuple[int, int]:
    return next(size for kind, size in SMALLEST.items() if name.startswith(kind))


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


@torch.inference_mode()
def check_all_ways(
    model: DeepMoE, x: Tensor, gates: list[Tensor], allowed: float = SINGLE, runs: int = SETTLED
) -> SparseModel:
    sparse = sparsify(model)
    expected = model.gating(model.network, x, gates)
    assert error(sparse.run_masked(sparse.start(x), torch.cat(gates, dim=1)), expected) <= allowed
    for _ in range(runs):
        assert error(sparse.run_dynamic(sparse.start(x), tuple(gates)), expected) <= allowed
    return sparse


@pytest.mark.parametrize("name", list_models())
def test_every_model_of_the_zoo(name: str) -> None:
    model = make(name, wide=0.25, classes=7)
    gates = random_gates(model.gating.widths, 2)
    check_all_ways(model, torch.randn(2, 3, *size_of(name)), gates, runs=1)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options_of_the_zoo_and_every_way_of_each_layer(name: str, options: dict) -> None:
    model = make(name, **options)
    x = torch.randn(1, 3, *size_of(name))
    sparse = check_all_ways(model, x, random_gates(model.gating.widths, 1))
    assert any("stream" in times for times in sparse.dynamic.planner.times.values())


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("images", [1, 33])
@pytest.mark.parametrize("name", ["vgg16", "resnet20"])
def test_densities_and_batches(name: str, images: int, density: float) -> None:
    model = make(name, wide=0.25)
    gates = random_gates(model.gating.widths, images, density)
    x = torch.randn(images, 3, *size_of(name))
    check_all_ways(model, x, gates, runs=SETTLED if images == 1 else 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    model = make("resnet20", wide=2).to(dtype)
    gates = [g.to(dtype) for g in random_gates(model.gating.widths, 3)]
    x = torch.randn(3, 3, 32, 32).to(dtype)
    check_all_ways(model, x, gates, HALF if dtype == torch.bfloat16 else 1e-12, runs=4)


@pytest.mark.parametrize(
    ("own", "run"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
def test_a_precision_other_than_the_models_own(own: torch.dtype, run: torch.dtype) -> None:
    model = with_varied_routes(make("vgg16", wide=0.25), routes=5).to(own)
    sparse = sparsify(model, dtype=run)
    for images in (1, 3):
        x = torch.randn(images, 3, 32, 32)
        with torch.inference_mode():
            expected = model(x.to(own)).logits
            for _ in range(SETTLED if images == 1 else 2):
                assert error(sparse(x.to(own)).logits.double(), expected.double()) <= SINGLE


def test_mixed_batch_with_shared_routes_and_a_closed_layer() -> None:
    model = make("vgg16", wide=0.25)
    gates = random_gates(model.gating.widths, 6)
    for g in gates:
        g[3] = 2.0 * g[1]  # the same route, other values
        g[4] = g[1]
    gates[4][2] = 0.0  # an image with a layer that is closed
    check_all_ways(model, torch.randn(6, 3, 32, 32), gates)


def test_whole_model_gives_the_same_outputs_by_whatever_way() -> None:
    model = with_varied_routes(make("vgg16", wide=0.25), routes=5)
    x = torch.randn(9, 3, 32, 32)
    with torch.inference_mode():
        expected = model(x)
        sparse = sparsify(model)
        for _ in range(2 * (TRIALS + 1) + 1):
            output = sparse(x)
            assert error(output.logits, expected.logits) <= SINGLE
            assert error(output.embedding_logits, expected.embedding_logits) <= SINGLE
            for ours, theirs in zip(output.gates, expected.gates, strict=True):
                torch.testing.assert_close(ours, theirs)
    assert len(sparse.planner.chosen) == 1  # the batch's way is decided


def test_channels_that_nothing_can_switch_on_are_removed() -> None:
    model = with_varied_routes(make("resnet20", wide=2), routes=4)
    dead = torch.rand(len(model.heads.weight)) < 0.5
    model.heads.weight.data[dead] = -model.heads.weight.data[dead].abs()
    alive = int((model.heads.weight.max(dim=1).values > 0).sum())
    sparse = sparsify(model)
    gated = [layer for layer in sparse.program.layers.values() if layer.outs is not None]
    kept = sum(len(layer.weight) for layer in gated)
    assert kept == alive < len(dead)
    x = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        for _ in range(10):
            assert error(sparse(x).logits, model(x).logits) <= SINGLE


def test_a_layer_that_nothing_can_switch_on() -> None:
    model = with_varied_routes(make("vgg16", wide=0.25), routes=4)
    widths = model.gating.widths
    model.heads.weight.data[widths[0] : widths[0] + widths[1]] = -1.0
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert error(sparsify(model)(x).logits, model(x).logits) <= SINGLE


@pytest.mark.parametrize(
    ("name", "gates"), [("vgg16", "inner"), ("resnet20", "inner"), ("resnet18", "all")]
)
@pytest.mark.parametrize("limit", [None, 1])
def test_codes_run_as_small_networks(name: str, gates: str, limit: int | None) -> None:
    plain = make(name, wide=0.5, gates=gates)
    model = with_codebook(with_varied_routes(plain, routes=5), codes=3)
    x = torch.randn(17, 3, 32, 32)
    sparse = sparsify(model, memory_limit=limit)
    networks = sparse.small_networks
    with torch.inference_mode():
        expected = model(x).logits
        codes = model.codebook.nearest(model.heads(model.embedding(x)[0]))
        assert len(codes.unique()) > 1  # a mixed batch
        for _ in range(2):
            features, images, counts = networks.sort(sparse.start(x).features_BCHW, codes)
            ours = networks(features, counts.tolist(), (32, 32))
            assert error(in_order(ours, images), expected) <= SINGLE
            assert len(networks.networks) == (3 if limit is None else 1)
        for _ in range(10):
            assert error(sparse(x).logits, expected) <= SINGLE


def test_original_model_is_left_alone_and_is_not_needed() -> None:
    model = with_varied_routes(make("vgg11", wide=0.25), routes=3)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = model(x).logits
    sparse = sparsify(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert error(sparse(x).logits, expected) <= SINGLE


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda s: s.double(), "move the model, then sparsify"),
        (lambda s: s.load_state_dict({}), "load them, then sparsify"),
        (lambda s: s.state_dict(), "save the model it was made of"),
        (copy.deepcopy, "can't be copied or pickled"),
        (copy.copy, "can't be copied or pickled"),
        (pickle.dumps, "can't be copied or pickled"),
        (lambda s: torch.save(s, io.BytesIO()), "can't be copied or pickled"),
        (sparsify, "sparse already"),
        (lambda s: s.train(), "can't be trained"),
        (lambda s: s(torch.zeros(0, 3, 32, 32)), "no images in the batch"),
        (lambda s: s(torch.zeros(2, 1, 32, 32)), r"images come normalised.*\(2, 1, 32, 32\)"),
        (lambda s: s(torch.zeros(2, 4, 32, 32)), "images come normalised"),
        (lambda s: s(torch.zeros(3, 32, 32)), "images come normalised"),
        (lambda s: s(torch.zeros(2, 3, 32)), "images come normalised"),
        (lambda s: s(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)), "not as uint8"),
        (lambda s: s(torch.zeros(2, 3, 16, 16)), "does not take images of 16x16 px"),
        (lambda s: s(torch.zeros(2, 3, 32, 32, device="meta")), "are on meta"),
    ],
)
def test_misuse_of_a_sparse_model_gets_one_sentence(misuse, message: str) -> None:
    with pytest.raises(UserError, match=message):
        misuse(sparsify(create_model("vgg11", wide=0.25).eval()))


def test_threads_may_share_a_sparse_model() -> None:
    model = with_varied_routes(make("vgg16", wide=0.25), routes=5)
    images = torch.randn(24, 3, 32, 32)
    with torch.inference_mode():
        expected = model(images).logits
    sparse = sparsify(model)

    def wrong(image: int) -> bool:
        logits = sparse(images[image : image + 1]).logits
        return error(logits, expected[image : image + 1]) > SINGLE

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(wrong, list(range(24)) * 20)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@torch.inference_mode()
def test_pixels_that_are_not_finite_spoil_their_image_alone(value: float) -> None:
    model = with_varied_routes(make("vgg16", wide=0.25), routes=5)
    sparse, images = sparsify(model), torch.randn(3, 3, 32, 32)
    expected = model(images).logits
    images[1, 0, 5, 5] = value
    logits = sparse(images).logits
    assert logits.isnan().any(dim=1).tolist() == [False, True, False]
    assert model(images).logits.isfinite().all(dim=1).tolist() == [True, False, True]
    assert error(logits[[0, 2]], expected[[0, 2]]) <= SINGLE


def test_weights_that_are_not_finite_are_refused() -> None:
    model = create_model("vgg11", wide=0.25)
    model.network.features[8].weight.data[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        sparsify(model)


def test_a_plan_is_kept_to_and_an_empty_one_measures_nothing() -> None:
    model = with_varied_routes(make("vgg16", wide=0.25), routes=5)
    x = torch.randn(1, 3, 32, 32)
    measured = sparsify(model)
    while not measured.planner.chosen:
        measured(x)
    for _ in range(50):  # what is chosen may have choices of its own
        measured(x)
    planned, unplanned = (sparsify(model, plan=p) for p in (measured.plan, Plan()))
    with torch.inference_mode():
        assert torch.equal(planned(x).logits, measured(x).logits)
        assert planned.plan.network == measured.plan.network
        # Where all channels ran fastest, layers' own ways do not come up.
        assert planned.plan.layers.items() <= measured.plan.layers.items()
        first = unplanned(x).logits
        assert error(first, model(x).logits) <= SINGLE
        assert torch.equal(unplanned(x).logits, first)
    assert not unplanned.planner.times and not unplanned.dynamic.planner.times


def test_of_two_convolutions_that_are_added_one_has_both_biases() -> None:
    model = make("resnet18_cifar", wide=0.25)
    network = model.network
    layers = translate(copy.deepcopy(network), model.gating, torch.float64).layers
    blocks = [f"layer{stage}.0" for stage in range(1, 5)]  # those with a convolution beside
    for at in blocks:
        block = network.get_submodule(at)
        own = fold(block.conv3, block.bn3, torch.float64).bias
        beside = fold(*block.downsample, torch.float64).bias
        biases = [layers[f"{at}.conv3"].bias, layers[f"{at}.downsample.0"].bias]
        (bias,) = [b for b in biases if b is not None]
        torch.testing.assert_close(bias, own + beside)
    assert sum(layer.bias is None for layer in layers.values()) == len(blocks)


@pytest.mark.parametrize("broken", ["gone", "wrong"])
def test_fused_operators_are_tried_before_they_are_used(broken: str, monkeypatch) -> None:
    def fused(layer, weight, x, onto):
        if broken == "gone":
            raise AttributeError("no such operator")
        return torch.zeros(2, 8, 6, 6)

    monkeypatch.setattr(convolution, "_by_onednn", fused)
    convolution._fused_by_onednn.cache_clear()
    try:
        assert not convolution.onednn_runs(torch.zeros(1))
        model = make("vgg11", wide=0.25)
        x = torch.randn(2, 3, 32, 32)
        with torch.inference_mode():
            assert error(sparsify(model)(x).logits, model(x).logits) <= SINGLE
    finally:
        convolution._fused_by_onednn.cache_clear()


def with_varied_routes(model: DeepMoE, routes: int) -> DeepMoE:
    """Gates by which random images take different routes."""
    set_routes(model, (32, 32), density=0.5, images=64)
    assert model.heads.weight.shape[1] >= routes
    return model


def with_codebook(model: DeepMoE, codes: int) -> DeepMoE:
    channels = sum(model.gating.widths)
    values = torch.rand(codes, channels) * (torch.rand(codes, channels) < 0.5)
    book = RouteCodebook(values, torch.ones(channels), model.gating.widths)
    return model.with_gates(codebook=book).eval()
