"""The model under everything that PyTorch may do to it."""

import io
import os

import pytest
import torch
import torch.multiprocessing as mp
from forked import START_METHOD
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepmoe import registry
from deepmoe.config import EmbeddingConfig, HeadsConfig
from deepmoe.losses import DeepMoELoss
from deepmoe.model import DeepMoE, DeepMoEOutput
from deepmoe.networks import ResNet
from deepmoe.networks.resnet import cifar_stages
from deepmoe.registry import create_model

KINDS = {
    "classes": {"embedding": EmbeddingConfig(widths=(8, 8))},
    "latent": {"embedding": EmbeddingConfig(form="latent", dim=6, widths=(8, 8))},
    "noisy-topk": {
        "embedding": EmbeddingConfig(widths=(8, 8)),
        "heads": HeadsConfig(kind="noisy-topk"),
    },
    "all": {"embedding": EmbeddingConfig(widths=(8, 8)), "gates": "all"},
    "dense": {"gates": None},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()  # PyTorch limits how often one function is compiled in a process


def make(kind: str) -> DeepMoE:
    """A network like the zoo's resnet20, with one block a stage: compilers take their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_MODELS", dict(registry._MODELS))
        registry._register_residual("resnet8", ResNet, cifar_stages(8), "basic", "cifar", "pad")
        return create_model("resnet8", classes=10, **KINDS[kind])


def assert_outputs_close(one: DeepMoEOutput, other: DeepMoEOutput, **tolerance: float) -> None:
    torch.testing.assert_close(one.logits, other.logits, **tolerance)
    torch.testing.assert_close(one.embedding_logits, other.embedding_logits, **tolerance)
    torch.testing.assert_close(one.gates, other.gates, **tolerance)


def test_heads_and_exits_need_an_embedding() -> None:
    model = make("classes")
    for heads, exit_at in ((model.heads, None), (None, torch.tensor(0.5))):
        with pytest.raises(ValueError, match="need an embedding"):
            DeepMoE(None, heads, model.network, model.gating, exit_at=exit_at)


def test_the_forward_pass_leaves_nothing_behind() -> None:
    model = make("classes").eval()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model(torch.randn(2, 3, 16, 16))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_route_gives_the_gates_before_the_base_network_runs() -> None:
    model = make("classes").eval()
    x = torch.randn(2, 3, 16, 16)
    gates, embedding_logits = model.route(x)
    output = model(x)
    torch.testing.assert_close(gates, output.gates)
    torch.testing.assert_close(embedding_logits, output.embedding_logits)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_one_graph_with_gradients(kind: str) -> None:
    model = make(kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x, labels = torch.randn(4, 3, 16, 16), torch.tensor([1, 2, 3, 4])
    DeepMoELoss(0.01)(compiled(x), labels).total.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    assert_outputs_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


def test_compiled_by_inductor_equals_eager() -> None:
    model = make("classes").eval()
    x = torch.randn(2, 3, 16, 16)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        assert_outputs_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    model = make(kind)
    x, labels = torch.randn(4, 3, 16, 16), torch.tensor([1, 2, 3, 4])
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        loss = DeepMoELoss(0.01)(output, labels).total
    loss.backward()
    assert output.logits.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in output.gates or ())
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last(kind: str) -> None:
    model = make(kind).eval()
    x = torch.randn(2, 3, 16, 16)
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    output = model(x.to(memory_format=torch.channels_last))
    assert_outputs_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_for_any_batch_size_and_survives_a_file(kind: str) -> None:
    model = make(kind).eval()
    example = torch.randn(2, 3, 16, 16)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    x = torch.randn(5, 3, 16, 16)
    output = loaded(x)
    assert isinstance(output, DeepMoEOutput)
    assert_outputs_close(output, model(x), atol=1e-5, rtol=1e-5)


def _gradients_on_rank(rank: int, port: str, kind: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = make(kind).eval()  # evaluation mode: batch norm would see half of the batch only
    wrapped = DistributedDataParallel(model)
    x, labels = torch.randn(4, 3, 16, 16), torch.tensor([1, 2, 3, 4])
    part = slice(2 * rank, 2 * rank + 2)
    DeepMoELoss(0.01)(wrapped(x[part]), labels[part]).total.backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in model.named_parameters()}, results)
    dist.barrier()
    # PyTorch takes a group apart under the interpreter's lock, and waits for a thread that may be
    # waiting for that lock: now and then, forever.
    os._exit(0)


@pytest.mark.parametrize("kind", ["classes", "latent"])
def test_ddp_gives_the_gradients_of_one_process(kind: str, tmp_path) -> None:
    results = str(tmp_path / "gradients.pt")
    given = (str(tmp_path / "port"), kind, results)
    mp.start_processes(_gradients_on_rank, given, nprocs=2, start_method=START_METHOD)
    torch.manual_seed(0)
    model = make(kind).eval()
    x, labels = torch.randn(4, 3, 16, 16), torch.tensor([1, 2, 3, 4])
    DeepMoELoss(0.01)(model(x), labels).total.backward()
    distributed = torch.load(results)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert distributed[name] is None
        else:
            torch.testing.assert_close(distributed[name], parameter.grad, atol=1e-5, rtol=1e-4)
