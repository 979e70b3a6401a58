"""The measurement of the sparse engine runs, and says what it measured."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forked import call_forked
from helpers import tiny_config

from deepmoe.bench.sparse import bench_sparse
from deepmoe.bench.subjects import Subject, untrained_subject
from deepmoe.cli import main
from deepmoe.random_routes import routes_as_codebook, set_routes
from deepmoe.registry import create_model
from deepmoe.sparse import Plan, sparsify
from deepmoe.training import fit

KEYS = {
    "dense_wide_ms",
    "dense_base_ms",
    "presliced_ms",
    "dynamic_ms",
    "codebook_ms",
    "max_error",
    "rerouted",
    "batch",
    "density",
    "device",
    "dtype",
    "threads",
}
QUICK = ["--rounds", "1", "--device", "cpu", "--no-compile", "--json"]


def bench(*arguments: object) -> dict:
    result = CliRunner().invoke(main, ["bench", "sparse", *map(str, arguments), *QUICK])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_untrained_network_with_codes(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    values = bench(
        "vgg11", "--wide", 0.25, "--density", 0.25, "--batch", 3, "--codes", 2, "--save", saved
    )
    assert set(values) >= KEYS
    assert (values["batch"], values["codes"], values["dtype"]) == (3, 2, "float32")
    assert values["density"] == pytest.approx(0.25, abs=0.01)
    assert 0 <= values["max_error"] <= 1e-4 and values["rerouted"] == 0
    assert min(v for key, v in values.items() if key.endswith("_ms") and key != "spread_ms") > 0
    written = json.loads(saved.read_text())
    assert written["values"] == values
    assert "bench sparse vgg11 --wide 0.25 --density 0.25 --batch 3" in written["command"]


def test_lists_give_all_combinations_and_codes_may_be_left_out() -> None:
    measured = bench("vgg11", "--wide", 0.25, "--density", "0.5,1", "--batch", "1,2")
    assert [(v["density"], v["batch"]) for v in measured] == [(0.5, 1), (0.5, 2), (1, 1), (1, 2)]
    assert all(v["codebook_ms"] is None for v in measured)


def test_a_saved_plan_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    bench("vgg11", "--wide", 0.25, "--batch", "1,2", "--codes", 2, "--save-plan", plan)
    assert {"dynamic", "dense"} & set(Plan.load(plan).network.values())
    assert Plan.load(plan).layers
    assert call_forked(write_outputs, plan, tmp_path / "there.json") == 0
    write_outputs(plan, tmp_path / "here.json")
    here, there = ((tmp_path / name).read_text() for name in ("here.json", "there.json"))
    assert here == there
    first, *others = json.loads(here)
    assert all(other == first for other in others)


def write_outputs(plan: Path, path: Path) -> None:
    """Notes what a network gives for some images by a plan, several times."""
    subject = untrained_subject(
        "vgg11", density=0.5, batch=1, codes=None, size=None, device="cpu", options={"wide": 0.25}
    )
    sparse = sparsify(subject.dynamic, plan=plan)
    path.write_text(json.dumps([sparse(subject.images).logits.tolist() for _ in range(3)]))


def test_gates_on_the_residual_stream() -> None:
    model = create_model("resnet18", gates="all", wide=0.5).eval()
    set_routes(model, (32, 32), density=0.5)
    base = create_model("resnet18", gates=None).eval()
    subject = Subject(model, None, base, torch.randn(2, 3, 32, 32))
    values = bench_sparse(subject, dtype=torch.float32, rounds=1, compile_dense=False).values
    assert values["max_error"] <= 1e-4 and values["rerouted"] == 0


def test_trained_gates_are_measured_on_data(tmp_path: Path) -> None:
    run = fit(tiny_config("train.finetune_epochs=0"), tmp_path, quiet=True)
    values = bench(run.checkpoint, "--batch", 5, "--codes", 3)
    assert values["batch"] == 5 and 1 <= values["codes"] <= 3
    assert 0 <= values["max_error"] <= 1e-4 and values["rerouted"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        *[("--density", "2"), ("--batch", "x"), ("--batch", "0"), ("--batch", str(10**15))],
        *[("--input", "1"), ("--save-plan", __file__), ("--set", "data.root=elsewhere")],
    ],
)
def test_mistakes_get_one_sentence(arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(main, ["bench", "sparse", "vgg11", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and len(result.stderr.splitlines()) == 1


def test_routes_have_the_density_asked_for_and_tell_images_apart() -> None:
    model = create_model("resnet20", wide=2).eval()
    set_routes(model, (32, 32), density=0.3)
    gates, _ = model.route(torch.randn(16, 3, 32, 32))
    for g, width in zip(gates, model.gating.widths, strict=True):
        assert ((g > 0).sum(dim=1) == round(0.3 * width)).all()
    assert len(torch.cat(gates, dim=1).unique(dim=0)) > 8
    coded = routes_as_codebook(model)
    same, _ = coded.route(torch.randn(16, 3, 32, 32))
    assert len(coded.codebook.codes) == model.heads.weight.shape[1]
    assert all((g >= 0).all() for g in same)
