"""Imports are light and go one way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import deepmoe

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout


def test_importing_brings_in_neither_plots_nor_training_nor_cuda() -> None:
    heavy = [
        "matplotlib",
        "sklearn",
        "scipy",
        "lightning_fabric",
        "torchmetrics",
        "triton",
        "jinja2",
        "rich",
    ]
    code = f"""
import sys, torch
before = set(sys.modules)
import deepmoe
new = set(sys.modules) - before
print([m for m in {heavy} if m in new], torch.cuda.is_initialized(), len(new))
"""
    found, cuda, count = python(code).rsplit(maxsplit=2)
    assert (found, cuda) == ("[]", "False")
    assert int(count) < 20


def test_building_a_model_brings_in_neither_plots_nor_training() -> None:
    code = """
import sys, torch, deepmoe
model = deepmoe.create_model("resnet20")
deepmoe.count_macs(model, 32)
deepmoe.DeepMoELoss()
print([m for m in ("matplotlib", "lightning_fabric", "torchmetrics") if m in sys.modules])
print(torch.cuda.is_initialized())
"""
    assert python(code).split() == ["[]", "False"]


def test_every_public_name_is_there() -> None:
    assert set(deepmoe.__all__) == set(deepmoe._HOMES)
    for name in deepmoe.__all__:
        assert getattr(deepmoe, name).__name__ == name
    assert set(deepmoe.__all__) <= set(dir(deepmoe))


def test_imports_go_one_way() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "1 kept, 0 broken" in result.stdout


MISSING = {
    "lightning_fabric": ("train", "deepmoe.fit"),
    "sklearn": ("train", "from deepmoe.data.digits import read_digits; read_digits()"),
    "matplotlib": ("report", "import deepmoe.analysis.plots"),
    "jinja2": ("report", "import deepmoe.analysis"),
    "ray": (
        "ray",
        "from deepmoe.sweep import on_ray; on_ray.ray_cluster('auto', None, [], 1).__enter__()",
    ),
    "numba": ("sparse", "deepmoe.sparsify(deepmoe.create_model('resnet20'))"),
}


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What is told where a package is missing; each in a fork of one process, for PyTorch's sake.

    Python takes `None` in a package's place for its being missing.
    """
    code = f"""
import json, os, sys, torch
import deepmoe, deepmoe.errors
for package, (_, use) in {MISSING}.items():
    if not (child := os.fork()):
        sys.modules[package] = None
        try:
            exec(use)
        except deepmoe.errors.UserError as error:
            print(json.dumps([package, str(error)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    return dict(json.loads(line) for line in python(code).splitlines())


@pytest.mark.parametrize("package", MISSING)
def test_a_missing_extra_is_told_in_one_sentence(package: str, told: dict[str, str]) -> None:
    extra, _ = MISSING[package]
    assert told[package] == f"this needs {package}: pip install 'deepmoe[{extra}]'"


def test_evaluation_and_prediction_need_no_extra() -> None:
    missing = ("lightning_fabric", "sklearn", "matplotlib", "jinja2", "numba", "torchmetrics")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
import deepmoe, torch
from deepmoe.evaluation import predict
model = deepmoe.create_model("resnet20", classes=10)
print(deepmoe.evaluate(model, [(torch.randn(2, 3, 32, 32), torch.arange(2))]).images)
deepmoe.MacsBudget(model, 32, 0.5, steps=10)
"""
    assert python(code) == "2\n"
