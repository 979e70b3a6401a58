import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

import deepmoe
from deepmoe.config import EmbeddingConfig, HeadsConfig
from deepmoe.evaluation import collect_gates
from deepmoe.evaluation.memory import measure_memory, peak_bytes
from deepmoe.evaluation.narrowing import narrowed_model, used_channels
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE
from deepmoe.pruning import prune
from deepmoe.registry import create_model

X = torch.randn(6, 3, 16, 16)
BATCHES = [(X, torch.arange(6) % 3)]


def tiny(**options) -> DeepMoE:
    torch.manual_seed(3)
    heads = HeadsConfig(init="normal(0, 1)", **options.pop("heads", {}))
    embedding = EmbeddingConfig(widths=(4,))
    made = create_model(
        "resnet20", classes=3, widths=[4] * 9, embedding=embedding, heads=heads, **options
    )
    return made.eval()


def with_codes(model: DeepMoE, codes: int) -> DeepMoE:
    gates_BC = torch.cat(model.route(X)[0], dim=1)[:codes].detach()
    weight = torch.ones(gates_BC.shape[1])
    return model.with_gates(codebook=RouteCodebook(gates_BC, weight, model.gating.widths)).eval()


def test_peaks_are_counted_by_hand() -> None:
    """Two tensors of 2048 bytes are alive at a time, however long the chain."""
    chain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(nn.ReLU() for _ in range(4)))
    with torch.no_grad():
        assert (
            peak_bytes(lambda: chain(torch.ones(1, 3, 8, 8)), torch.device("cpu")) == 2 * 2048 + 768
        )


def test_parameters_and_bytes_are_counted_by_hand() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5, 2)
    )
    embedding = EmbeddingConfig(form="latent", dim=2, widths=(4,))
    model = deepmoe.gate(network, torch.randn(2, 3, 5, 5), embedding=embedding).eval()
    used = [np.arange(6) < 2]
    memory = measure_memory(model, torch.randn(1, 3, 5, 5), used)
    convs, linear = (3 * 6 * 9 + 6) + (6 * 5 * 9 + 5), 5 * 2 + 2
    assert memory["dense"].parameters == convs + linear
    assert memory["dense"].weight_bytes == 4 * (convs + linear)
    assert memory["dense"].file_bytes == len(save(network.state_dict()))
    looks = 3 * 4 * 9 + 2 * 4 + (4 * 2 + 2) + (2 * 2 + 2)  # convolution, norm, two linear layers
    heads = 6 * 2
    assert memory["masked"].parameters == convs + linear + looks + heads
    left = (3 * 2 * 9 + 2) + (2 * 5 * 9 + 5)
    assert memory["narrowed"].parameters == left + linear + looks + 2 * 2
    for variant in memory.variants:
        assert (
            variant.weight_bytes < variant.file_bytes and variant.weight_bytes < variant.peak_bytes
        )
    assert memory.as_dict() == measure_memory(model, torch.randn(1, 3, 5, 5), used).as_dict()


@pytest.mark.parametrize("kind", ["relu", "noisy-topk", "codes"])
def test_a_narrowed_model_answers_as_before(kind: str) -> None:
    model = tiny(heads={} if kind == "codes" else {"kind": kind})
    if kind == "codes":
        model = with_codes(model, 2)
    record = collect_gates(model, BATCHES, tuple("abc"))
    used = used_channels(record)
    assert not all(mask.all() for mask in used)
    small = narrowed_model(model, used)
    with torch.no_grad():
        torch.testing.assert_close(small(X).logits, model(X).logits)
    assert sum(small.gating.widths) < sum(model.gating.widths)


def test_codes_keep_a_small_network_each() -> None:
    model = with_codes(tiny(), 2)
    memory = measure_memory(model, X)
    choosing = sum(p.numel() for part in (model.embedding, model.heads) for p in part.parameters())
    networks = [deepmoe.deploy.static_network(model, code) for code in model.codebook.codes]
    small = sum(p.numel() for network in networks for p in network.parameters())
    assert memory["codebook"].parameters == choosing + small
    assert [variant.name for variant in memory.variants] == ["dense", "masked", "codebook"]


def test_other_kinds_are_measured_beside_the_dense_network() -> None:
    dense = create_model("resnet20", classes=3, widths=[4] * 9, gates=None).eval()
    assert [variant.name for variant in measure_memory(dense, X).variants] == ["dense"]
    pruned = prune(dense, 16, 0.5, BATCHES, by="strength")
    memory = measure_memory(pruned, X)
    assert memory["dense"].parameters == sum(p.numel() for p in dense.parameters())
    assert memory["dense"].file_bytes == measure_memory(dense, X)["dense"].file_bytes
    assert memory["pruned"].weight_bytes < memory["dense"].weight_bytes
    assert pruned.unpruned.skeleton.fc.weight.is_meta  # nothing of the model has changed
    exits = create_model("resnet20", classes=3, widths=[4] * 9, gates=None, exits=True)
    assert [variant.name for variant in measure_memory(exits, X).variants] == ["dense", "exits"]
    assert exits.training


def test_memory_under_autocast_does_not_depend_on_what_ran_before() -> None:
    """Copies of weights in half precision are kept until autocast ends: they count each time."""
    network, image = torch.nn.Conv2d(8, 8, 3), torch.randn(1, 8, 9, 9)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first, second = (peak_bytes(lambda: network(image), image.device) for _ in range(2))
    assert first == second > 2 * network.weight.numel()
