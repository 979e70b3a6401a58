"""All convolutions of a network in one call, against the network itself."""

import gc
import weakref
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import randomise_statistics
from torch import Tensor, nn

from deepmoe.graph import Gating, describe
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model, list_models
from deepmoe.sparse import Plan, SparseModel, planner, sparsify, threads
from deepmoe.sparse.chain import CHAINED, LIBRARY, Chain, ChainedNetwork
from deepmoe.sparse.planner import in_words
from deepmoe.sparse.threads import some_of

SIZES = {"vgg": (33, 47), "resnet": (29, 31), "drn": (33, 41)}
ALLOWED = 1e-4  # relative error


@pytest.fixture(params=["1 thread", "2 threads", "8 threads", "pool"])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """More threads than there are cores among them: none may wait for one that has not begun."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "pool" else int(request.param[0]))
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp_parallel", lambda: None)
    yield
    torch.set_num_threads(before)


def made(name: str, **options: object) -> DeepMoE:
    torch.manual_seed(0)
    model = create_model(name, gates=None, **options).eval()
    randomise_statistics(model)
    return model


def case_of(x_BCHW: Tensor) -> tuple:
    return ("whole", *x_BCHW.shape[1:], torch.get_num_threads())


def chained(model: DeepMoE, *images: Tensor) -> SparseModel:
    """The engine, told to take the chain for images of these sizes."""
    return sparsify(model, plan=Plan({in_words(case_of(x)): CHAINED for x in images}))


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("name", list_models())
def test_every_model_of_the_zoo(name: str) -> None:
    model = made(name, wide=0.25, classes=7)
    size = next(size for kind, size in SIZES.items() if name.startswith(kind))
    images = [torch.randn(1, 3, *size) for _ in range(3)]
    sparse = chained(model, images[0])
    for x in images:  # the second run finds what the first has left
        assert error(sparse(x).logits, model(x).logits) <= ALLOWED
    network = sparse.static.chained[case_of(images[0])]
    assert network.layers >= 2 * network.chains, "layers go on with a chain, they don't begin one"


@torch.inference_mode()
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("name", "size"), [("vgg16", (32, 32)), ("resnet18_cifar", (32, 32))])
def test_any_number_of_threads(name: str, size: tuple[int, int]) -> None:
    model = made(name, wide=0.3, classes=10)
    x = torch.randn(1, 3, *size)
    sparse, expected = chained(model, x), model(x).logits
    first = sparse(x).logits
    assert error(first, expected) <= ALLOWED
    for _ in range(30):  # whoever comes first to a piece, sums are the same
        assert torch.equal(sparse(x).logits, first)


@torch.inference_mode()
def test_all_of_vgg_is_one_call() -> None:
    model, x = made("vgg16", wide=0.3), torch.randn(1, 3, 32, 32)
    sparse = chained(model, x)
    sparse(x)
    network = sparse.static.chained[case_of(x)]
    assert (network.layers, network.chains) == (13, 1)


class AllConvolutions(nn.Module):
    """Ends with a convolution, whose output it gives as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 20, 3, padding=1)
        self.second = nn.Conv2d(20, 24, 3, stride=2, padding=1)
        self.last = nn.Conv2d(24, 6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x))))).flatten(1)


def without_gates(network: nn.Module) -> DeepMoE:
    with torch.inference_mode(False):
        graph = describe(network.eval(), torch.randn(2, 3, 16, 16))
        return DeepMoE(None, None, network, Gating(graph, ())).eval()


@torch.inference_mode()
def test_results_are_not_written_over_by_the_next_run() -> None:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = without_gates(AllConvolutions())
    first, second = torch.randn(2, 1, 3, 16, 16)
    sparse = chained(model, first)
    given = sparse(first).logits
    before = given.clone()
    sparse(second)
    assert torch.equal(given, before)
    assert error(given, model(first).logits) <= ALLOWED


class Around(nn.Module):
    """Two convolutions, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 20, 3, padding=1)
        self.between = between
        self.second = nn.Conv2d(20, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).mean((2, 3))


def into_itself(x: Tensor) -> Tensor:
    return torch.abs(x, out=x)


@torch.inference_mode()
@pytest.mark.parametrize(
    "between",
    [
        *(nn.CELU(inplace=True), nn.SELU(inplace=True), nn.Threshold(0.1, -0.3, inplace=True)),
        *(into_itself, nn.Dropout(inplace=True)),
    ],
    ids=lambda b: getattr(b, "__name__", type(b).__name__),
)
def test_what_changes_a_result_in_place_is_not_left_out(between: Any) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = without_gates(Around(between))
    x = torch.randn(1, 3, 16, 16)
    sparse = chained(model, x)
    for _ in range(2):
        assert error(sparse(x).logits, model(x).logits) <= ALLOWED


@torch.inference_mode()
@pytest.mark.parametrize(
    "between",
    [lambda x: x.view(x.size(0), 20, -1).view(x.shape), lambda x: x.view(-1).view_as(x)],
    ids=["view", "view_as"],
)
def test_views_of_results_that_lie_apart(between: Any) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = without_gates(Around(between))
    x = torch.randn(1, 3, 16, 16)
    assert error(chained(model, x)(x).logits, model(x).logits) <= ALLOWED


@torch.inference_mode()
def test_compiled_code_goes_without_a_chain() -> None:
    torch.manual_seed(0)
    with torch.inference_mode(False):
        model = without_gates(AllConvolutions())
    x = torch.randn(1, 3, 16, 16)
    compiled = torch.compile(chained(model, x), backend="eager")
    assert error(compiled(x).logits, model(x).logits) <= ALLOWED


@torch.inference_mode()
def test_any_default_precision() -> None:
    model, x = made("vgg11", wide=0.25), torch.randn(1, 3, 32, 32)
    expected = chained(model, x)(x).logits
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(chained(model, x)(x).logits, expected)
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def test_a_slower_chain_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = cycle([1.0, 2.0])  # the library's run comes first
    monkeypatch.setattr(planner, "timed", lambda run, _: (run(), next(seconds)))
    model, x = made("vgg11", wide=0.25), torch.randn(1, 3, 32, 32)
    sparse = sparsify(model)
    sparse(x), sparse(x)
    assert case_of(x) in sparse.static.chained
    for _ in range(8):
        sparse(x)
    assert sparse.plan.network[in_words(case_of(x))] == LIBRARY
    assert not sparse.static.chained


@torch.inference_mode()
def test_sizes_batches_and_threads_may_change_from_call_to_call() -> None:
    model = made("vgg16", wide=0.2, classes=5)
    small, large = torch.randn(1, 3, 32, 32), torch.randn(1, 3, 40, 56)
    sparse, before = chained(model, small, large), torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            for x in (small, large, torch.randn(3, 3, 32, 32), small):
                assert error(sparse(x).logits, model(x).logits) <= ALLOWED
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_pixels_that_are_no_numbers_are_told() -> None:
    model, x = made("vgg11", wide=0.25), torch.randn(1, 3, 32, 32)
    sparse = chained(model, x)
    good = sparse(x).logits
    x_bad = x.clone()
    x_bad[0, 1, 5, 5] = float("nan")
    assert sparse(x_bad).logits.isnan().all() == model(x_bad).logits.isnan().all()
    assert torch.equal(sparse(x).logits, good), "nothing of it is left"


@torch.inference_mode()
def test_the_faster_way_is_found_and_kept() -> None:
    model, x = made("vgg16", wide=0.2), torch.randn(1, 3, 32, 32)
    sparse = sparsify(model)
    for _ in range(16):
        logits = sparse(x).logits
    chosen = sparse.plan.network[in_words(case_of(x))]
    assert chosen in (LIBRARY, CHAINED)
    again = sparsify(model, plan=sparse.plan)
    assert torch.equal(again(x).logits, logits), "the same plan, the same bits"
    assert sparsify(model, plan=Plan())(x).logits.shape == logits.shape, "an empty plan is enough"


@torch.inference_mode()
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 1), (2, 3), (5, 5)])
def test_maxima_of_squares(size: int, stride: int) -> None:
    from deepmoe.sparse.numba_kernels import max_pool

    wide = torch.randn(7, 13, 20)
    wide[2, 4, 5] = float("nan")
    x = wide[:, :, :17]
    expected = F.max_pool2d(x, size, stride)
    out, chain = torch.empty_like(expected), Chain()
    shape = (size, stride, *expected.shape[1:], x.stride(0), x.stride(1))
    chain.add(max_pool.ctypes, len(x), [*shape, some_of(len(x)), x, out])
    chain.close()
    for _ in range(2):
        chain.run()
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
def test_small_networks_of_codes_and_the_embedding_are_chained_too() -> None:
    with torch.inference_mode(False):
        model = create_model("vgg11", wide=0.5, classes=5).eval()
        randomise_statistics(model)
        channels = sum(model.gating.widths)
        codes = torch.rand(2, channels) * (torch.rand(2, channels) < 0.5)
        book = RouteCodebook(codes, torch.ones(channels), model.gating.widths)
        model = model.with_gates(codebook=book).eval()
    x = torch.randn(1, 3, 32, 32)
    names = ("code", "embedding")
    cases = {in_words((name, *x.shape[1:], torch.get_num_threads())): CHAINED for name in names}
    sparse = sparsify(model, plan=Plan(cases))
    for _ in range(2):
        assert error(sparse(x).logits, model(x).logits) <= ALLOWED
    assert sparse.fast_embedding.steps[0].chained.keys() == {("embedding", *case_of(x)[1:])}
    networks = sparse.small_networks
    (small,) = networks.networks.values()
    (static,) = small.networks.values()
    assert len(static.chained) == 1
    assert networks.bytes == small.executor.bytes + static.bytes > small.executor.bytes


@torch.inference_mode()
def test_memory_is_given_back_with_the_model() -> None:
    model, x = made("vgg11", wide=0.25), torch.randn(1, 3, 32, 32)
    sparse = chained(model, x)
    sparse(x)
    (network,) = sparse.static.chained.values()
    gone = weakref.ref(network)
    gc.disable()  # a cycle of references would wait for it, with all weights
    try:
        del sparse, network
        assert gone() is None
    finally:
        gc.enable()


def test_a_network_without_such_layers_has_an_empty_chain() -> None:
    network = ChainedNetwork(lambda run, x: x * 2, {}, None, torch.zeros(1, 3, 4, 4))
    x = torch.randn(1, 3, 4, 4)
    assert network.layers == 0
    torch.testing.assert_close(network(x), 2 * x)
