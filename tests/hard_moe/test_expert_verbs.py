"""Verbs and functions take a model of experts, or say in one sentence that they can't."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from expert_models import EXPERTS, mixture, model_of
from helpers import tiny_config
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepmoe.bench.subjects import trained_subject
from deepmoe.checkpoint import load_checkpoint
from deepmoe.cli import main
from deepmoe.config import config_from_dict
from deepmoe.errors import UserError
from deepmoe.evaluation import cost_curve, cut_to, set_exits
from deepmoe.evaluation.gate_record import collect_gates
from deepmoe.pruning import prune
from deepmoe.registry import create_model
from deepmoe.training import FitResult, fit
from deepmoe.widening import widen


def deepmoe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize("sparse", [(), ("--sparse",)])
def test_eval_and_predict_take_it(
    whole_run: FitResult, tmp_path: Path, sparse: tuple[str, ...]
) -> None:
    result = deepmoe("eval", whole_run.checkpoint, "--json", *sparse)
    assert result.exit_code == 0, result.output
    values, expected = json.loads(result.stdout), whole_run.evaluation
    assert (values["accuracy"], values["macs"]) == (expected.accuracy, expected.macs)
    assert values["macs_share"] == expected.macs / expected.dense_macs
    Image.new("L", (12, 9), 200).save(tmp_path / "grey.png")
    result = deepmoe("predict", whole_run.checkpoint, tmp_path / "grey.png", "--json", *sparse)
    assert result.exit_code == 0, result.output
    (answer,) = json.loads(result.stdout)
    assert answer["macs"] == expected.macs and answer["label"] in "0123456789"


@pytest.mark.parametrize("verb", [("curve",), ("cut", "--macs", "0.5"), ("exits", "--macs", "0.5")])
def test_verbs_that_need_gates_say_so(
    verb: tuple[str, ...], whole_run: FitResult, tmp_path: Path
) -> None:
    out = () if verb == ("curve",) else ("--out", tmp_path / "small")
    result = deepmoe(verb[0], whole_run.checkpoint, *verb[1:], *out)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert "made of experts" in result.output and "Traceback" not in result.output


def test_there_is_nothing_to_skip_that_could_be_timed(whole_run: FitResult) -> None:
    with pytest.raises(UserError, match="no channels to skip"):
        trained_subject(whole_run.checkpoint, batch=1, codes=None, device="cpu")


def test_functions_that_need_gates_say_so() -> None:
    model, x = model_of()
    batches: Any = [(x, torch.zeros(len(x), dtype=torch.long))]
    for refused in (
        lambda: cost_curve(model, batches),
        lambda: cut_to(model, 16, 0.5, batches, batches),
        lambda: set_exits(model, batches, macs=0.5),
        lambda: prune(model, 16, 0.5, batches),
        lambda: widen(model, 2),
    ):
        with pytest.raises(UserError, match="made of experts"):
            refused()
    record = collect_gates(model, batches, tuple("abcdef"))
    assert record.gates == () and record.experts.tolist() == model.cluster(x).tolist()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model.experts=1",), "from 2 to 64, not be 1"),
        (("model.experts=1000000000",), "from 2 to 64"),
        (("model.gates=inner",), "neither gates nor exits"),
        (("model.exits=true",), "neither gates nor exits"),
        (("train.prune=0.5", "train.start=a"), "that is already trained"),
        (("embedding.form=network", "embedding.prune=0.5"), "that is already trained"),
        (("train.target_macs=0.5",), "experts have none"),
        (("train.codes=4", "train.finetune_epochs=1"), "needs a gated model"),
        (("train.compile=on",), "can't be compiled"),
    ],
)
def test_settings_that_do_not_go_together_get_one_sentence(
    settings: tuple[str, ...], words: str
) -> None:
    basic = ("model.gates=none", "model.experts=4", "train.start=a", "train.finetune_epochs=0")
    with pytest.raises(UserError, match=words):
        tiny_config(*basic, *settings)


def test_runs_that_can_not_be_get_one_sentence(start: FitResult, tmp_path: Path) -> None:
    gated = fit(
        tiny_config("train.epochs=1", "train.finetune_epochs=0"), tmp_path / "gated", quiet=True
    )
    for settings, options, words in (
        ((), {"devices": 2}, "on one device, not on 2"),
        (("train.start=missing",), {}, "no checkpoint at missing"),
        ((f"train.start={gated.checkpoint}",), {}, "has gates, but experts have none"),
        (("model.widths=[8, 8, 8, 8, 8, 8, 8, 8, 8]",), {}, "from has different layers or widths"),
        ((f"model.kept={[4] * 9}",), {}, "different layers or widths"),
        (("data.holdout=100",), {}, "held out here"),
    ):
        with pytest.raises(UserError, match=words):
            fit(mixture(start, *settings), tmp_path / "run", quiet=True, **options)
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"name its checkpoint by train\.start"):
        fit(tiny_config("model.gates=none", "model.experts=2"), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match="no features to cluster images by"):
        create_model("drn_a_50", gates=None, experts=2, wide=0.1)
    with pytest.raises(UserError, match="neither gates nor exits"):
        create_model("resnet20", experts=2)


@pytest.mark.parametrize(
    ("experts", "words"),
    [(10**9, "damaged header: .*from 2 to 64"), (4, "does not fit its own model")],
)
def test_a_file_that_lies_about_its_experts_is_refused(
    experts: int, words: str, whole_run: FitResult, tmp_path: Path
) -> None:
    with safe_open(whole_run.checkpoint, framework="pt") as file:
        header = dict(file.metadata())
    config = json.loads(header["config"])
    assert config_from_dict(config).model.experts == EXPERTS
    config["model"]["experts"] = experts
    changed = header | {"config": json.dumps(config)}
    save_file(load_file(whole_run.checkpoint), tmp_path / "a", changed)
    with pytest.raises(UserError, match=words):
        load_checkpoint(tmp_path / "a")
