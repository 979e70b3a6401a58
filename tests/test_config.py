import pytest

from deepmoe.config import (
    LossConfig,
    ModelConfig,
    RunConfig,
    apply_overrides,
    config_from_dict,
    config_to_toml,
    load_config,
    preset_names,
)
from deepmoe.errors import UserError
from deepmoe.schema import value_at


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_survives_being_printed(name: str, tmp_path) -> None:
    config = load_config(name)
    printed = tmp_path / "printed.toml"
    printed.write_text(config_to_toml(config))
    assert load_config(printed) == config


def test_a_full_configuration_survives_being_printed(tmp_path) -> None:
    config = config_from_dict(
        {
            "model": {"widths": [1, 2], "gate_last": True, "block": "bottleneck-b", "gates": "all"},
            "embedding": {"form": "latent", "widths": [3], "shrink": 2},
            "loss": {
                "sparsity": [[0, 0], [5, 1e-3]],
                "distillation": 0.5,
                "embedding_distillation": 0.9,
            },
            "train": {"start": "a", "prune": 0.5, "prune_by": "strength", "teacher": "b"},
        }
    )
    assert config.loss.sparsity == ((0.0, 0.0), (5.0, 0.001))
    assert config.model.widths == (1, 2)
    looks = {"form": "network", "prune": 0.1, "kept": [2, 1]}
    begun = {"embedding": looks, "model": {"kept": [3, 1]}, "train": {"start": "a", "prune": 0.2}}
    for whole in (config, config_from_dict(begun)):
        (tmp_path / "printed.toml").write_text(config_to_toml(whole))
        assert load_config(tmp_path / "printed.toml") == whole


def test_extends_reaches_one_level(tmp_path) -> None:
    (tmp_path / "child.toml").write_text('extends = "quickstart"\n[train]\nlr = 0.5\n')
    child = load_config(tmp_path / "child.toml")
    assert child.train.lr == 0.5
    assert child.model == load_config("quickstart").model
    (tmp_path / "grandchild.toml").write_text(f'extends = "{tmp_path}/child.toml"\n')
    with pytest.raises(UserError, match="itself extends"):
        load_config(tmp_path / "grandchild.toml")


def test_overrides_are_read_as_toml_and_else_as_text() -> None:
    config = load_config(
        "quickstart",
        ["train.lr=1e-3", "model.widths=w13-all", "data.root=/some/where", "data.mirror=true"],
    )
    assert config.train.lr == 1e-3
    assert config.model.widths == "w13-all"
    assert config.data.root == "/some/where"
    assert config.data.mirror is True
    assert apply_overrides(config, ["train.seed=7"]).train.seed == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.epoch=3"], r"unknown config key train.epoch \(did you mean train.epochs\?\)"),
        (["trian.epochs=3"], r"unknown config key trian \(did you mean train\?\)"),
        (["train=3"], "train must be a table"),
        (["train.epochs=three"], "train.epochs: expected int, got 'three'"),
        (["train.epochs=2.5"], "train.epochs: expected int"),
        (["train.epochs=true"], "train.epochs: expected int"),
        (["train.epochs=-1"], "train.epochs must lie from 0"),
        (["train.weight_decay=-1"], "train.weight_decay must lie from 0"),
        (["train.lr=nan"], "train.lr must lie"),
        (["heads.share=2"], "heads.share"),
        (["data.mirror=1"], "data.mirror: expected bool"),
        (["model.gates=some"], "model.gates: expected one of inner, all, none"),
        (["model.block=other"], "model.block: expected one of"),
        (["model.widths=[1, -2]"], "model.widths: expected a name or a list of whole numbers"),
        (["loss.sparsity=[[3, 1], [2, 1]]"], "loss.sparsity: expected a number or points"),
        (["loss.sparsity=x"], "loss.sparsity: expected a number or points"),
        (["embedding.widths=[1, 'a']"], "embedding.widths: expected int, got 'a'"),
        (["data.scale=[2, 0.5]"], "data.scale must rise"),
        (["loss.sparsity=1e300"], r"loss.sparsity must lie from 0 to 1e\+12"),
        (["loss.sparsity=[[nan, 1], [1, 2]]"], "loss.sparsity: expected a number or points"),
        (["loss.sparsity=[[0, inf], [1, 2]]"], "loss.sparsity: expected a number or points"),
        (["loss.embedding=-1"], "loss.embedding must lie"),
        (["embedding.widths=[1000000000]"], "embedding.widths must lie from 1 to 100000"),
        (["embedding.widths=[" + "8, " * 99 + "8]"], "embedding.widths has at most 16 numbers"),
        (["train.seed=0x" + "f" * 5000], "train.seed"),
        (["train.lr=1" + "0" * 400], "train.lr"),
        (["data.mixup=0.2"], "data.mixup = 0.2 was removed: leave it out"),
        (["heads.group=8"], "heads.group = 8 was removed: leave it out"),
        (["heads.revive=0.1"], "heads.revive = 0.1 was removed"),
        (["embedding.temperature=[1, 2]"], "embedding.temperature = .* was removed"),
        (["train.budget_by_cost=true"], "train.budget_by_cost = True was removed"),
        (["train.random_threshold=1"], "train.random_threshold = 1 was removed: .*deepmoe cut"),
        (["train.prune=0.5"], "train.prune removes channels from the network of train.start"),
        (["train.prune=0", "train.start=x"], "train.prune must lie from 1e-12 to 1"),
        (["train.prune=1.5", "train.start=x"], "train.prune must lie from"),
        (["train.prune_tilt=1.5"], "train.prune_tilt must lie from 0 to 1"),
        (["train.prune_by=mood"], "train.prune_by: expected one of taylor, strength"),
        (
            ["train.prune=0.5", "train.start=x", "train.epochs=0"],
            "after pruning, gates must be trained: set train.epochs",
        ),
        (["model.kept=[1, a]"], "model.kept"),
        (["embedding.form=network"], "prunes a trained network: set train.start, and"),
        (["embedding.form=network", "embedding.prune=0.1"], "set train.start, and embedding.prune"),
        (["embedding.form=network", "train.start=x"], "set train.start, and embedding.prune"),
        (["embedding.prune=0.1", "train.start=x"], 'embedding.prune is for embedding.form = "net'),
        (["embedding.kept=[3]"], "embedding.prune is for embedding.form"),
        (["embedding.prune=2", "train.start=x"], "embedding.prune must lie from"),
        (["embedding.shrink=0"], "embedding.shrink must lie from 1"),
        (["loss.embedding_distillation=0.5"], "embedding_distillation needs a train.teacher"),
        (["loss.embedding_distillation=1.5"], "loss.embedding_distillation must lie from 0 to 1"),
        (["schema=4"], "schema 4, of a later deepmoe; this one reads up to 3"),
        (["schema=0"], "schema must be the version"),
        (["schema=true"], "schema must be the version"),
        (["train.lr"], "--set takes key=value"),
        (["=1"], "--set takes key=value"),
    ],
)
def test_mistakes_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_config("quickstart", overrides)
    assert "\n" not in str(caught.value)


def test_unreadable_presets_are_named(tmp_path) -> None:
    with pytest.raises(
        UserError, match=r"no preset is named 'quikstart' \(did you mean quickstart"
    ):
        load_config("quikstart")
    with pytest.raises(UserError, match="cannot read preset"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "broken.toml").write_text("[train\n")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")
    for content in ("a = " + "[" * 100000, "a = " + "9" * 5000, "a = \0"):
        (tmp_path / "broken.toml").write_text(content)
        with pytest.raises(UserError, match="not valid TOML") as caught:
            load_config(tmp_path / "broken.toml")
        assert "\n" not in str(caught.value)
    (tmp_path / "broken.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_schedules_are_joined_by_lines() -> None:
    points = ((2.0, 1.0), (4.0, 3.0), (8.0, 0.0))
    assert [value_at(points, e) for e in (0, 2, 3, 4, 6, 8, 9)] == [1, 1, 2, 3, 1.5, 0, 0]
    assert value_at(0.5, 100) == 0.5


def test_the_dense_twin_differs_in_its_gates_alone() -> None:
    config = RunConfig(model=ModelConfig(name="vgg16"), loss=LossConfig(sparsity=1.0))
    assert config.dense.model.gates == "none"
    assert not apply_overrides(config, ["model.exits=true"]).dense.model.exits
    assert apply_overrides(config.dense, ["model.gates=inner"]) == config


def test_settings_that_are_gone_are_dropped_where_they_asked_for_nothing() -> None:
    gone = ["heads.group=1", "heads.revive=0.0", "data.mixup=0.0", "train.budget_by_cost=false"]
    assert load_config("quickstart", [*gone, "train.random_threshold=0"]) == load_config(
        "quickstart"
    )


def test_a_configuration_carries_its_version(tmp_path) -> None:
    assert config_to_toml(load_config("quickstart")).startswith("schema = 3\n")
    first = {"heads": {"group": 1, "revive": 0.0, "kind": "relu"}, "model": {"name": "vgg16"}}
    assert config_from_dict(first) == config_from_dict({"schema": 2, "model": {"name": "vgg16"}})


def test_noisy_top_k_of_earlier_versions_keeps_gates_that_sum_to_one() -> None:
    heads = {"heads": {"kind": "noisy-topk"}}
    totals = [config_from_dict({**old, **heads}).heads.total for old in ({}, {"schema": 2})]
    assert totals == ["one", "one"]
    assert config_from_dict({"schema": 3, **heads}).heads.total == "kept"
    assert load_config("quickstart", ["heads.kind=noisy-topk"]).heads.total == "kept"
    assert config_from_dict({"schema": 2, "heads": {"kind": "relu"}}) == config_from_dict({})


def test_what_is_only_used_may_have_been_trained_with_what_is_gone() -> None:
    values = {"data": {"mixup": 0.5}, "train": {"random_threshold": 1.2}}
    assert config_from_dict(values, used=True) == config_from_dict({})
    with pytest.raises(UserError, match=r"data\.mixup"):
        config_from_dict(values)
