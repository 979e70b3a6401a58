"""Exits in the sparse engine: the same outputs, and no base network for images that exit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import randomise_statistics
from torch import Tensor

from deepmoe.config import HeadsConfig
from deepmoe.costs import count_macs, dense_macs
from deepmoe.cuda_graphs import Work
from deepmoe.errors import UserError
from deepmoe.evaluation import evaluate
from deepmoe.model import DeepMoE, confidence
from deepmoe.random_routes import routes_as_codebook, set_routes
from deepmoe.registry import create_model
from deepmoe.sparse import Plan, sparsify
from deepmoe.sparse.program import Program
from deepmoe.sparse.route_groups import roughly

IMAGES = 12
SIZE = (32, 32)


def relu_heads(name: str = "resnet20") -> DeepMoE:
    model = create_model(name, classes=6, wide=0.5).eval()
    randomise_statistics(model)
    set_routes(model, SIZE, density=0.5)
    model.embedding.project.weight.data /= 5e4  # how sure it is differs between images
    model.embedding.project.bias.data /= 5e4
    return model


def codebook() -> DeepMoE:
    return routes_as_codebook(relu_heads("vgg11"))


def top_k() -> DeepMoE:
    heads = HeadsConfig(kind="noisy-topk", share=0.4)
    return randomise_statistics(create_model("resnet20", classes=6, heads=heads).eval())


def no_heads(name: str = "resnet20") -> DeepMoE:
    made = create_model(name, classes=6, wide=0.5, gates=None, exits=True).eval()
    return randomise_statistics(made)


KINDS = {f.__name__: f for f in (relu_heads, codebook, top_k, no_heads)}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@torch.no_grad()
def between(model: DeepMoE, x: Tensor, share: float = 0.5) -> Tensor:
    """A threshold above which the embedding is for this share of the images, none near it."""
    sure = confidence(model.embedding(x)[1]).sort(descending=True).values
    count = round(share * len(x))
    return (sure[count - 1] + sure[count]) / 2


def with_exits(make: Callable[[], DeepMoE], share: float = 0.5) -> tuple[DeepMoE, Tensor]:
    """A model that answers this share of some images early, and the images."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(IMAGES, 3, *SIZE)
    model.exit_at = between(model, x, share)
    model.exit_vote = torch.tensor(0.3)
    return model, x


@torch.inference_mode()
def check(model: DeepMoE, sparse: DeepMoE, x: Tensor) -> None:
    expected, output = model(x), sparse(x)
    assert torch.equal(output.exited, expected.exited)
    close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.logits.abs().max())}
    torch.testing.assert_close(output.logits, expected.logits, **close)
    torch.testing.assert_close(output.embedding_logits, expected.embedding_logits, **close)
    assert (output.gates is None) == (expected.gates is None)
    for ours, theirs in zip(output.gates or (), expected.gates or (), strict=True):
        torch.testing.assert_close(ours, theirs * ~expected.exited[:, None], rtol=1e-4, atol=1e-4)


@pytest.fixture
def ran(monkeypatch) -> list[int]:
    """How many images each run of a base network was for."""
    counts: list[int] = []
    start = Program.start

    def counted(program: Program, run: object, x_BCHW: Tensor) -> Tensor:
        counts.append(len(x_BCHW))
        return start(program, run, x_BCHW)

    monkeypatch.setattr(Program, "start", counted)
    return counts


@every_kind
def test_outputs_are_the_models_and_only_images_that_go_on_run(make, ran) -> None:
    model, x = with_exits(make)
    sparse = sparsify(model)
    exited = model(x).exited
    assert exited.sum() == IMAGES // 2
    gone, left = x[exited], x[~exited]
    # One image, all, none, some, and other numbers of them one after the other.
    for images in (gone[:1], left[:1], gone, left, x, x[:7], x, gone[:2], x[3:]):
        ran.clear()
        check(model, sparse, images)
        going_on = int((~model(images).exited).sum())
        assert ran == [going_on] * bool(going_on)


@every_kind
def test_every_way_that_the_planner_tries(make) -> None:
    model, x = with_exits(make, 0.25)
    sparse = sparsify(model)
    for _ in range(10):
        check(model, sparse, x)
        check(model, sparse, x[:1])


class Graphs:
    """Does what CUDA graphs do: results of one call with inputs of one shape share their memory."""

    def __init__(self) -> None:
        self.memory: dict = {}

    def run(self, work: Work) -> object:
        made = work.function(*work.inputs)
        made = made if isinstance(made, tuple) else (made,)
        key = (work.name, *(x.shape for x in work.inputs))
        kept = self.memory.setdefault(key, tuple(map(torch.clone, made)))
        for own, new in zip(kept, made, strict=True):
            own.copy_(new)
        return kept if len(kept) > 1 else kept[0]

    def sizes(self, name: str) -> list[int]:
        return [shape[0] for found, shape, *_ in self.memory if found == name]


@every_kind
@torch.inference_mode()
def test_captured_networks_serve_numbers_of_images_that_are_about_the_same(make) -> None:
    model, x = with_exits(make)
    exited = model(x).exited
    gone, left = x[exited][0], x[~exited][0]
    sparse = sparsify(model, plan=Plan())
    sparse.graphs = Graphs()
    outputs = []
    for going_on in (17, 18, 0, 20, 17, 3, 20):
        images = torch.stack([left] * going_on + [gone] * (20 - going_on))[torch.randperm(20)]
        check(model, sparse, images)
        outputs.append((model(images), sparse(images)))
    for expected, output in outputs:  # what came later has not written over it
        assert torch.equal(output.exited, expected.exited)
        for ours, theirs in zip(output[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert sparse.graphs.sizes("whole" if model.heads is None else "prepare") == [18, 20, 3]


@every_kind
def test_heads_and_codebook_are_not_asked_for_an_image_that_exits(make, monkeypatch) -> None:
    model, x = with_exits(make, 0.9)
    sparse = sparsify(model)
    monkeypatch.setattr(sparse, "concatenated_gates", None)  # would fail if called
    monkeypatch.setattr(sparse, "codebook", None)
    gone = x[model(x).exited]
    check(model, sparse, gone)
    check(model, sparse, gone[:1])


@every_kind
def test_the_threshold_may_be_set_anew_or_off(make, ran) -> None:
    model, x = with_exits(make)
    sparse = sparsify(model)
    check(model, sparse, x)
    model.exit_at = between(model, x, 0.75)
    sparse.exit_at = model.exit_at.clone()
    check(model, sparse, x)
    sparse.exit_at = model.exit_at = None
    ran.clear()
    expected, output = model(x), sparse(x)
    assert output.exited is None and ran == [IMAGES]
    assert (output.embedding_logits is None) == (model.heads is None)  # it has nothing to say
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_its_own_threshold_and_vote_are_copies() -> None:
    model, x = with_exits(no_heads)
    sparse = sparsify(model)
    before = sparse(x).logits
    model.exit_at.fill_(0.0)
    model.exit_vote.fill_(1.0)
    assert sparse(x).exited.sum() == IMAGES // 2
    assert torch.equal(sparse(x).logits, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision(dtype: torch.dtype) -> None:
    model, x = with_exits(no_heads)
    output = sparsify(model, dtype=dtype)(x)
    with torch.inference_mode(), torch.autocast("cpu", enabled=dtype == torch.bfloat16):
        expected = model(x)
    assert output.logits.dtype == dtype
    assert torch.equal(output.exited, expected.exited)
    off = (output.logits - expected.logits).abs().max() / expected.logits.abs().max()
    assert off <= (2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_whole_network_by_name_and_images_in_another_memory_format() -> None:
    model, x = with_exits(lambda: no_heads("vgg11"))
    sparse = sparsify(model, plan=Plan())
    check(model, sparse, x.contiguous(memory_format=torch.channels_last))
    check(model, sparse, x.flip(0)[::2])


def test_evaluation_counts_what_was_run() -> None:
    for make in (relu_heads, no_heads):
        model, x = with_exits(make)
        labels = torch.arange(IMAGES) % 6
        batches = [(x[:8], labels[:8]), (x[8:], labels[8:])]
        expected, result = evaluate(model, batches), evaluate(sparsify(model), batches)
        assert result.exited == 0.5
        assert (result.accuracy, result.active) == (expected.accuracy, expected.active)
        assert result.macs == expected.macs < dense_macs(model, SIZE)
        looking = model.embedding.macs(*SIZE)
        macs = count_macs(model, SIZE, model(x).gates, model(x).exited)
        assert (macs == looking).sum() == IMAGES // 2


def test_threads_may_share_a_model_with_exits() -> None:
    model, x = with_exits(relu_heads)
    with torch.inference_mode():
        expected = model(x)
    sparse = sparsify(model)

    def right(image: int) -> bool:
        output = sparse(x[image : image + 1])
        same = torch.equal(output.exited, expected.exited[image : image + 1])
        logits = expected.logits[image : image + 1]
        return same and torch.allclose(output.logits, logits, rtol=1e-4, atol=1e-4)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, list(range(IMAGES)) * 6))


def test_a_model_whose_exits_are_not_set_gets_one_sentence() -> None:
    with pytest.raises(UserError, match="nothing to skip: run deepmoe exits first"):
        sparsify(create_model("resnet20", gates=None, exits=True))


@torch.no_grad()
@pytest.mark.parametrize("kept", [None, (5, 8, 3, 16, 11, 32, 7, 40, 64)])
def test_a_network_without_gates_runs_folded(kept: tuple[int, ...] | None) -> None:
    """Such as a pruned one, which has nothing left to skip."""
    model = create_model("resnet20", gates=None, kept=kept).eval()
    randomise_statistics(model)
    x = torch.randn(5, 3, 32, 32)
    sparse = sparsify(model)
    output = sparse(x)
    torch.testing.assert_close(output.logits, model(x).logits, rtol=1e-3, atol=1e-3)
    assert output.gates is None and output.exited is None and output.embedding_logits is None
    assert count_macs(sparse, 32) == count_macs(model, 32)


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["resnet20", "vgg11"])
def test_an_image_that_is_no_number_gets_no_answer(name: str, value: float) -> None:
    model, x = with_exits(lambda: no_heads(name))
    without = create_model(name, classes=6, wide=0.5, gates=None).eval()
    expected = model(x)
    for tried in (model, without):
        spoilt = x.clone()
        spoilt[3] = value
        sparse = sparsify(tried)
        for images, at in ((spoilt, 3), (spoilt[2:5], 1), (spoilt[3:4], 0)):
            for _ in range(3):  # ways differ, which the first runs try
                logits = sparse(images).logits
                assert logits.isnan().all(dim=1).nonzero().flatten().tolist() == [at]
        others = torch.arange(IMAGES) != 3
        if tried is model:
            found = sparse(spoilt)
            assert torch.equal(found.exited[others], expected.exited[others])
            torch.testing.assert_close(
                found.logits[others], expected.logits[others], rtol=1e-3, atol=1e-3
            )


def test_numbers_of_images_are_rounded_to_few() -> None:
    assert [roughly(n) for n in (1, 7, 8, 15, 17, 33, 300, 512)] == [1, 7, 8, 15, 18, 36, 320, 512]
    assert len({roughly(n) for n in range(1, 513)}) <= 64
    assert all(n <= roughly(n) <= 1.13 * n for n in range(1, 2000))
