"""Models in folders, as huggingface_hub keeps them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import deepmoe
from deepmoe.costs import count_costs, dense_macs
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.graph import prunable
from deepmoe.layers import RouteCodebook
from deepmoe.model import DeepMoE, confidence

pytest.importorskip("huggingface_hub")
X = torch.randn(3, 3, 32, 32)


def small(classes: int = 10) -> DeepMoE:
    torch.manual_seed(0)
    model = deepmoe.create_model("resnet20", classes=classes, widths=[8] * 9).eval()
    nn.init.normal_(model.heads.weight)
    return model


@torch.no_grad()
def pruned_with_exits() -> DeepMoE:
    """An embedding that answers some of X, and a network with half of its channels."""
    network = deepmoe.create_model("resnet20", classes=10, gates=None)
    kept = [max(1, width // 2) for width in prunable(network.gating.graph).widths]
    model = deepmoe.create_model("resnet20", classes=10, gates=None, exits=True, kept=kept).eval()
    model.exit_at = confidence(model(X).embedding_logits).median()
    assert dense_macs(model, 32) > 1.9 * count_costs(model, 32).macs
    return model


def own_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(1),
        nn.LazyLinear(5),
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["heads", "codebook", "dense", "double", "exits", "pruned"])
def test_a_folder_gives_back_the_same_model(kind: str, tmp_path) -> None:
    model, x = small(), X
    if kind == "codebook":
        width = sum(model.gating.widths)
        codes = torch.rand(3, width).sub(0.5).relu()
        model.codebook = RouteCodebook(codes, torch.ones(width), model.gating.widths)
    elif kind == "dense":
        model = deepmoe.create_model("resnet20", classes=10, gates=None).eval()
    elif kind == "double":
        model, x = model.double(), X.double()
    elif kind == "exits":
        model.exit_at = confidence(model(x).embedding_logits).median()
        model.exit_vote = torch.tensor(0.4)
    elif kind == "pruned":  # and without heads
        model = pruned_with_exits()
    model.save_pretrained(tmp_path / "model")
    loaded = DeepMoE.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert not loaded.training
    expected, found = model(x).exited, loaded(x).exited
    assert found is None if expected is None else torch.equal(found, expected)
    assert dense_macs(loaded, 32) == dense_macs(model, 32)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md"}


def test_the_files_are_for_people_and_for_every_verb(tmp_path) -> None:
    info = DataInfo(("cat", "dog"), (48, 48), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    small(2).save_pretrained(tmp_path, info=info)
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["classes"] == ["cat", "dog"] and told["image_size"] == [48, 48]
    assert told["model"]["name"] == "resnet20" and told["image_std"] == [0.4, 0.5, 0.6]
    assert deepmoe.load_checkpoint(tmp_path / "model.safetensors").info == info
    assert "exit_at" not in told
    model = pruned_with_exits()
    model.exit_at, model.exit_vote = torch.tensor(0.9), torch.tensor(0.15)
    model.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["exit_at"], told["exit_vote"]) == (0.9, 0.15)
    assert told["model"]["kept"] == list(model.source.kept)


@torch.no_grad()
def test_a_network_of_ones_own_is_given_again(tmp_path) -> None:
    torch.manual_seed(0)
    network = own_network()
    network(X)
    model = deepmoe.gate(network, X).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["image_size"] == [32, 32]
    with pytest.raises(UserError, match="give one like it"):
        DeepMoE.from_pretrained(tmp_path)
    other = own_network()
    other(X)
    loaded = DeepMoE.from_pretrained(tmp_path, network=other)
    assert torch.equal(loaded(X).logits, model(X).logits)


@torch.no_grad()
@pytest.mark.parametrize("factors", [(2,), (1.5,), (2, 2)])
def test_a_widened_model_is_given_its_network_as_it_was(factors, tmp_path) -> None:
    network = own_network()
    network(X)
    model = deepmoe.gate(network, X).eval()
    for factor in factors:
        model = deepmoe.widen(model, factor)
    model.save_pretrained(tmp_path)
    other = own_network()
    other(X)
    for made in (other, model.network):
        loaded = DeepMoE.from_pretrained(tmp_path, network=made)
        assert torch.equal(loaded(X).logits, model(X).logits)
    assert loaded.gating.widths == model.gating.widths


def test_what_config_json_says_runs_nothing(tmp_path) -> None:
    small().save_pretrained(tmp_path)
    told = {"model": {"name": "os:system"}, "network": "os:system", "device": "nowhere", "self": 1}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert DeepMoE.from_pretrained(tmp_path).source.name == "resnet20"
    with pytest.raises(UserError, match="no argument named netwrok"):
        DeepMoE.from_pretrained(tmp_path, netwrok=3)


@pytest.mark.parametrize("name", ["no/such/folder", "a b", "", "../x"])
def test_what_is_not_there_gets_one_sentence(name: str, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="there is no model at") as raised:
        DeepMoE.from_pretrained(name)
    assert "\n" not in str(raised.value)


def test_broken_folders_get_one_sentence(tmp_path) -> None:
    small().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="there is no model at"):
        DeepMoE.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="damaged"):
        DeepMoE.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        small().save_pretrained(tmp_path / "README.md" / "folder")


def test_half_precision_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"call \.float\(\)"):
        small().bfloat16().save_pretrained(tmp_path)


def test_what_is_uploaded_is_the_folder(monkeypatch) -> None:
    seen = {}

    def upload(self, *, repo_id, folder_path, **options):
        seen.update(repo=repo_id, names=sorted(p.name for p in Path(folder_path).iterdir()))
        return "url"

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    made = SimpleNamespace(repo_id="me/model")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda self, *_, **__: made)
    small().push_to_hub("me/model")
    assert seen["repo"] == "me/model" and "model.safetensors" in seen["names"]
