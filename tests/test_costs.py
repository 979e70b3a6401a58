import pytest
import torch
from helpers import counted_macs, random_gates

from deepmoe.costs import active_share, count_costs, count_macs, least
from deepmoe.errors import UserError
from deepmoe.model import DeepMoE
from deepmoe.registry import create_model, list_models, model_entry


def on_meta(name: str, **options: object) -> DeepMoE:
    with torch.device("meta"):
        return create_model(name, **options)


def test_vgg16_on_cifar100() -> None:
    costs = count_costs(on_meta("vgg16", classes=100), 32)
    assert costs.conv_macs == 313196544
    assert costs.macs == 313196544 + 512 * 100


@pytest.mark.parametrize(
    ("widths", "conv_params", "macs"),
    [
        ("w1-high", "24.15", "3.51"),
        ("w1-mid", "24.16", "9.18"),
        ("w4-low", "24.18", "43.16"),
        ("w13-all", "24.18", "8.15"),
    ],
)
def test_widening_strategies_count_as_printed_in_the_paper(widths, conv_params, macs) -> None:
    costs = count_costs(on_meta("vgg16", classes=100, widths=widths), 32)
    assert f"{costs.conv_params / 1e6:.2f}" == conv_params
    assert f"{costs.conv_macs / 1e8:.2f}" == macs
    assert f"{costs.macs / 1e8:.2f}" == macs


@pytest.mark.parametrize(
    ("name", "options", "params", "giga_macs"),
    [
        ("resnet50", {}, 25557032, "4.089"),
        ("resnet101", {}, 44549160, "7.801"),
        ("resnet50", {"wide": 2, "block": "bottleneck-a"}, 68883240, "11.398"),
        ("resnet50", {"wide": 2, "block": "bottleneck-b"}, 41911720, "6.761"),
        ("resnet18", {}, 11689512, "1.814"),
        ("resnet34", {}, 21797672, "3.664"),
    ],
)
def test_imagenet_networks(name, options, params, giga_macs) -> None:
    costs = count_costs(on_meta(name, **options), 224)
    assert costs.params == params
    assert f"{costs.macs / 1e9:.3f}" == giga_macs


def test_resnet56_on_cifar10() -> None:
    costs = count_costs(on_meta("resnet56", classes=10), 32)
    assert costs.params == 853018
    assert f"{costs.macs / 1e6:.2f}" == "125.49"


def test_widening_drn_a_50_costs_what_the_paper_says() -> None:
    size = (1024, 2048)
    narrow = count_costs(on_meta("drn_a_50", classes=19), size).macs
    wide = count_costs(on_meta("drn_a_50", classes=19, wide=2, block="bottleneck-a"), size).macs
    assert (wide - narrow) / 1e9 == pytest.approx(2173 - 703, rel=0.01)


def test_embedding_is_two_percent_of_resnet110() -> None:
    costs = count_costs(on_meta("resnet110", classes=10), 32)
    assert f"{costs.embedding_macs / costs.macs:.2%}" == "2.04%"


# One network of each family and block: deeper ones have more of the same.
FAMILIES = ("vgg11", "resnet20", "resnet18_cifar", "resnet18", "resnet50", "drn_a_50")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(({}, name) for name in list_models()),
        *(({"wide": 2}, name) for name in FAMILIES),
        *(({"wide": 0.5, "gates": "all"}, name) for name in FAMILIES),
    ],
    ids=str,
)
def test_dense_macs_equal_pytorchs_own_count(name: str, options: dict) -> None:
    model = on_meta(name, **options)
    size = model_entry(name).input_size
    size = (130, 256) if name == "drn_a_50" else size
    x = torch.empty(1, 3, *size, device="meta")
    costs = count_costs(model, size)
    assert costs.macs == counted_macs(model.network, x)
    assert count_macs(model.gating, size) == costs.macs
    assert costs.embedding_macs == counted_macs(model.embedding, x)
    assert count_macs(model, size) == counted_macs(model, x)
    assert costs.params == sum(p.numel() for p in model.network.parameters())
    assert costs.gate_params == sum(p.numel() for p in model.heads.parameters())


@pytest.mark.parametrize("block", ["basic", "bottleneck-a", "bottleneck-b"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet18_cifar"])
def test_every_block_in_every_family(name: str, block: str) -> None:
    model = on_meta(name, block=block, classes=10)
    x = torch.empty(1, 3, 64, 64, device="meta")
    assert count_costs(model, 64).macs == counted_macs(model.network, x)


def test_gates_of_one_cost_the_dense_network() -> None:
    model = create_model("resnet20")
    open_gates = [torch.ones(3, w) for w in model.gating.widths]
    assert count_macs(model, 32, open_gates).tolist() == [count_macs(model, 32)] * 3
    assert active_share(open_gates).tolist() == [1.0] * 3


def test_a_batch_gives_one_number_an_image() -> None:
    gating = create_model("resnet20").gating
    gates = random_gates(gating.widths, 4, 0.4)
    whole = count_macs(gating, 32, gates)
    assert whole.shape == (4,)
    assert whole.dtype == torch.int64
    alone = [int(count_macs(gating, 32, [g[i : i + 1] for g in gates])) for i in range(4)]
    assert whole.tolist() == alone


def test_gates_and_sizes_that_do_not_fit_are_refused() -> None:
    gating = create_model("resnet20").gating
    with pytest.raises(UserError, match="gates of widths"):
        count_macs(gating, 32, [])
    with pytest.raises(UserError, match="at least one pixel"):
        count_macs(gating, 0)


def test_bisection_finds_the_least_that_is_enough() -> None:
    assert least(lambda x: x >= 0.3, 0.0, 1.0) == pytest.approx(0.3, abs=1e-8)
    assert int(least(lambda x: int(x) >= 7, 0, 100)) == 7
    assert least(lambda x: True, 2.0, 3.0) == 2.0
