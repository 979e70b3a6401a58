"""What tables and figures of the paper are made of: runs, settings, rows, costs."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from deepmoe.checkpoint import TrainState, save_checkpoint
from deepmoe.cli import main
from deepmoe.config import RunConfig
from deepmoe.configured_models import model_from_config
from deepmoe.costs import cost_matrix, count_costs, macs_of_counts
from deepmoe.data import DataInfo
from deepmoe.errors import UserError
from deepmoe.paper import PAGES, SCALES, figure_shuffle, page_named, scale_named
from deepmoe.paper.figure_expressive import log10_miss
from deepmoe.paper.networks import NETWORKS
from deepmoe.paper.page import ERROR, MACS, Column, Made, Row
from deepmoe.paper.plan import Plan
from deepmoe.paper.recipes import LITERAL
from deepmoe.paper.table_imagenet_wide import RESNET101_MACS
from deepmoe.paper.table_imagenet_wide import WIDE as IMAGENET
from deepmoe.paper.table_widening import STRATEGIES
from deepmoe.paper.tables import line_of, run_figures, shown
from deepmoe.sweep import RESULTS_NAME
from deepmoe.sweep.results import add_result


def paper(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["paper", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table-cifr"], ["table-cifr", "did you mean table-cifar", "figure-rnp"]),
        (["table-cifar", "--scale", "tiny"], ["no scale", "tiny", "full, short, smoke"]),
        (["all", "table-cifar"], ["give all or list alone"]),
        (["table-cifar", "--seeds", "a"], ["--seeds", "'a'"]),
        (["table-cifar", "--seeds", "-1"], ["--seeds", "from 0 on"]),
        (["table-cifar", "--set", "model.wide=3"], ["model", "--set can't change it"]),
        (["figure-rnp", "--set", "train={seed=3}"], ["train.seed", "--set can't change it"]),
        (["figure-rnp", "--set", "loss.sparsity=1"], ["loss", "--set can't change it"]),
        (["figure-rnp", "--set", "data.name=digits"], ["CIFAR-100", "digits"]),
        (["figure-rnp", "--set", "train.epochs=nan"], ["train.epochs"]),
        (["table-cifar", "--set", "data.root=/nowhere"], ["/nowhere", "data.root=PATH", "archive"]),
        (["table-cityscapes", "--set", "data.root=/nowhere"], ["CamVid", "labels/SPLIT/NAME.png"]),
        (["all", "--set", "data.root=/nowhere"], ["there is data for none of these"]),
        (["all", "--set", "heads.init=ones"], ["heads", "--set can't change it"]),
        (["all", "--scale", "smoke", "--set", "train.epochs=x"], ["train.epochs"]),
        (["table-imagenet-wide"], ["data/imagenet", "train/CLASS/"]),
    ],
)
def test_mistakes_are_told_in_one_sentence_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = paper(*arguments)
    assert result.exit_code == 2, result.output
    *_, line = result.stderr.splitlines()
    assert line.startswith("Error: ") and all(word in line for word in words), line
    assert not result.stdout and not list(tmp_path.iterdir())


def test_names_are_listed_with_what_they_need_and_take() -> None:
    shown_names = paper()
    assert shown_names.exit_code == 0 and all(name in shown_names.stdout for name in PAGES)
    assert len(PAGES) == 11 and "train/CLASS/" in shown_names.stdout
    for line in json.loads(paper("list", "--json").stdout):
        assert line["needs"] and line["shortened"] and set(line["takes"]) == set(SCALES)


def test_the_plan_says_what_would_be_trained(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no data
    result = paper("figure-shuffle", "--dry-run", "--json", "--set", "train.epochs=9")
    assert result.exit_code == 0, result.output
    runs = {line["run"]: line for line in json.loads(result.stdout)}
    ours = runs[OURS_RUN]
    assert ours["epochs"] == 9 + 1 and not ours["done"] and ours["to train"]
    assert set(ours["after"]) == {name for name in runs if "dense" in name}
    assert "runs to train" in paper("figure-shuffle", "--dry-run").stdout
    assert not list(tmp_path.iterdir())


def test_the_plan_tells_of_runs_that_are_done_and_trained_again_for_their_weights(
    tmp_path: Path,
) -> None:
    """As in a folder that only the results were kept of."""
    arguments = ("table-memory", "--dry-run", "--scale", "smoke", "--out", tmp_path)
    runs = plan_of("smoke", "table-memory", made_up=str(tmp_path / "data")).runs
    for name in ("cifar100-vgg16-dense-seed0", "cifar100-vgg16-literal-seed0"):
        metrics = [{"epoch": 2, "accuracy": 0.5}]
        written = tmp_path / RESULTS_NAME
        add_result(written, runs[name], metrics, command="test", origin={"hardware": "a test"})
    shown_plan = paper(*arguments, "--json")
    assert shown_plan.exit_code == 0, shown_plan.output
    lines = {line["run"]: line for line in json.loads(shown_plan.stdout)}
    dense, literal = (
        lines.pop("cifar100-vgg16-dense-seed0"),
        lines.pop("cifar100-vgg16-literal-seed0"),
    )
    assert dense["done"] and dense["to train"]  # ours starts from it
    assert literal["done"] and not literal["to train"]  # nothing needs its weights
    assert lines and all(line["to train"] and not line["done"] for line in lines.values())
    told = paper(*arguments).stdout
    assert f"{len(lines) + 1} of {len(lines) + 2} runs to train" in told
    assert "1 of them is done, but" in told


def test_the_plan_counts_the_epochs_that_are_left(tmp_path: Path) -> None:
    name, arguments = "cifar100-vgg16-dense-seed0", ("--scale", "smoke", "--out", tmp_path)

    def epochs() -> int:
        *_, words = paper("figure-expressive", "--dry-run", *arguments).stdout.split(" runs to ")
        return int(words.split()[1])

    before = epochs()
    run = plan_of("smoke", "figure-expressive", made_up=str(tmp_path / "data")).runs[name]
    model = model_from_config(run.config, 100, size=(32, 32))
    info = DataInfo(tuple(f"class {i}" for i in range(100)), (32, 32), (0.5,) * 3, (0.5,) * 3)
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    save_checkpoint(folder / "last.safetensors", model, run.config, info, TrainState(epoch=1))
    assert epochs() == before - 1


def test_a_folder_that_can_not_be_named_in_settings_is_refused(tmp_path: Path) -> None:
    result = paper(
        "table-memory", "--scale", "smoke", "--out", os.fsdecode(b"%s/\xff" % bytes(tmp_path))
    )
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "UTF-8" in line


OURS_RUN = "cifar100-vgg16-ours-68.5-seed0"


def plan_of(scale: str, *names: str, **options) -> Plan:
    plan = Plan(scale_named(scale), **options)
    for name in names:
        page_named(name).rows(plan)
    return plan


def test_runs_are_shared_and_the_same_whoever_asks() -> None:
    alone = {name: plan_of("short", name).runs for name in ("table-cifar", "figure-prune-cifar")}
    both = plan_of("short", *alone).runs
    assert both == {**alone["table-cifar"], **alone["figure-prune-cifar"]}
    common = alone["table-cifar"].keys() & alone["figure-prune-cifar"].keys()
    assert {"cifar10-resnet56-dense-seed0", "cifar10-resnet56-ours-46-seed0"} <= common
    pruned = both["cifar10-resnet56-li-50-seed0"]
    assert pruned.config.train.start == "run:cifar10-resnet56-dense-seed0"
    assert plan_of("short", "figure-rnp", seeds=(2,)).runs["cifar100-vgg16-rnp-50-seed2"]


@pytest.mark.parametrize("name", PAGES)
def test_seeds_that_are_asked_for_are_those_of_every_row(name: str) -> None:
    rows = PAGES[name].rows(Plan(SCALES["short"], seeds=(4, 7)))
    ends = {tuple(run.rpartition("-")[2] for run in row.runs) for row in rows}
    assert ends - {()} == {("seed4", "seed7")}


def test_gates_are_shuffled_in_the_networks_of_all_seeds() -> None:
    def measured(own: float) -> dict[str, Any]:
        line = {"own": own, "in_group": own / 2, "out_of_group": 0.0, "group": "fish"}
        return {"classes": {"ray": line, "trout": line}, "under": [["ray", own, True]]}

    rows = [{"curve": "ours", "runs": ["a", "b", "missing"]}, {"curve": "literal", "runs": ["c"]}]
    made = Made(Plan(SCALES["short"]), Path(), {}, {"a": measured(40), "b": measured(60)}, rows)
    (table,) = figure_shuffle.more(made)
    assert table.cells == (("fish", "50.00 %", "25.00 %", "0.00 %", "25.00", "2"),)
    assert len(table.header) == len(table.cells[0])
    ours, literal = figure_shuffle.plot(made).axes
    assert [bar.get_height() for bar in ours.patches] == [50] and not literal.patches


@pytest.mark.parametrize("seeds", [None, (2, 0), (5,)])
@pytest.mark.parametrize("scale", ["smoke", "short"])
def test_runs_learn_from_the_same_teachers_whatever_else_is_asked_for(
    scale: str, seeds: tuple[int, ...] | None
) -> None:
    """A page is also made alone, of runs that were trained for several, and by other seeds."""
    every = {run.name: run for run in plan_of(scale, *PAGES, seeds=seeds).grid(1).runs}
    for name in PAGES:
        for run in plan_of(scale, name, seeds=seeds).grid(1).runs:
            assert every[run.name] == run
    taught = {tuple(run.lessons) for run in every.values() if "vgg16-ours" in run.name}
    teachers = SCALES[scale].teachers
    data = ("cifar10", "cifar100")
    assert taught == {tuple(f"{d}-vgg16-dense-seed{seed}" for seed in teachers) for d in data}


def test_teachers_look_once_at_the_short_scale_and_at_every_batch_at_the_full_one() -> None:
    def teachers(scale: str) -> Any:
        return plan_of(scale, "figure-shuffle").runs[OURS_RUN].config.train.teacher

    named = ",".join(f"cifar100-vgg16-dense-seed{seed}" for seed in (0, 1, 2))
    assert teachers("short") == f"lessons:{named}"
    full = [f"run:cifar100-vgg16-dense-seed{seed}" for seed in (0, 1, 2)]
    assert list(teachers("full")) == [*full, "run:cifar100-vgg16-w13-all-dense-seed0"]
    grid = plan_of("short", "figure-shuffle").grid(1)
    (ours,) = [run for run in grid.runs if run.name == OURS_RUN]
    assert set(ours.needs) == {f"cifar100-vgg16-dense-seed{seed}" for seed in (0, 1, 2)}
    assert grid.views == scale_named("short").epochs("cifar")  # another view in each epoch


def test_what_is_stopped_has_trained_all_of_its_first_seed_first() -> None:
    runs = [run.name for run in plan_of("short", "table-cifar").grid(1).runs]
    place = {name: number for number, name in enumerate(runs)}
    last_of_first = max(place[n] for n in runs if n.endswith("-seed0"))
    teachers = {f"{data}-vgg16-dense-seed{s}" for data in ("cifar10", "cifar100") for s in (1, 2)}
    second = [name for name in runs if name.endswith("-seed1") and name not in teachers]
    third = [name for name in runs if name.endswith("-seed2") and name not in teachers]
    assert all(place[name] < last_of_first for name in teachers)
    assert last_of_first < min(map(place.get, second))
    assert max(map(place.get, second)) < min(map(place.get, third))


def test_pages_say_how_long_the_short_scale_trains() -> None:
    short = scale_named("short")
    told = {name: page.shortened_at(short) for name, page in PAGES.items()}
    assert told["table-cifar"].startswith(f"{short.epochs('cifar')} epochs ")
    assert f"{short.epochs('segmentation')} epochs" in told["table-cityscapes"]
    assert scale_named("full").epochs("cifar") is None


@pytest.mark.parametrize(
    ("name", "run", "epochs"),
    [
        ("table-cifar", "cifar100-resnet110-wide2-literal-seed0", (270, 80)),
        ("table-cifar", "cifar10-resnet56-dense-seed2", (350, 0)),
        ("table-imagenet-wide", "imagenet-resnet50-b-wide2-literal-seed0", (100, 0)),
        ("table-cityscapes", "cityscapes-drn_a_50-wide2-literal-seed0", (250, 0)),
    ],
)
def test_the_full_scale_is_the_papers_schedule(name: str, run: str, epochs: tuple) -> None:
    config = plan_of("full", name).runs[run].config
    assert (config.train.epochs, config.train.finetune_epochs) == epochs
    assert config.train.schedule == "step" and config.train.teacher is None
    if "literal" in run:
        assert config.loss.l1 == LITERAL["loss.l1"] and config.heads.init == LITERAL["heads.init"]
        assert config.loss.embedding == (1.0 if name == "table-cifar" else 0.0)


def test_the_literal_recipe_stands_in_one_place(monkeypatch) -> None:
    monkeypatch.setitem(LITERAL, "loss.sparsity", 0.7)
    runs = plan_of("short", "figure-width", "table-widening").runs
    of_name = {name: run.config for name, run in runs.items() if "literal" in name}
    assert of_name["cifar100-vgg16-w13-all-literal-seed1"].loss.sparsity == 0.7
    assert of_name["cifar100-vgg16-w13-all-literal-seed1"].model.gate_last
    assert of_name["cifar100-resnet18-b-wide8-literal-2-seed0"].loss.sparsity == 2
    assert of_name["cifar100-resnet18-b-wide8-literal-2-seed0"].model.gate_last is None


def test_a_row_is_means_over_seeds_beside_the_papers_figures() -> None:
    dense = {"accuracy": 0.70, "macs": 2e8, "dense_macs": 2e8, "active": 1.0, "seconds": 3.0}
    first = run_figures(dense)
    second = run_figures({**dense, "accuracy": 0.72, "macs": 1e8})
    row = Row({"network": "net", "method": "ours"}, ("a", "b"), {"error": 27.5, "macs": 1.25e8})
    line = line_of(row, [first, second])
    assert line["error"] == pytest.approx(29) and line["seeds"] == 2
    assert line["error_deviation"] == pytest.approx(math.sqrt(2))
    assert line["share"] == pytest.approx(75) and line["reduction"] == pytest.approx(25)
    assert line["difference"]["error"] == pytest.approx(1.5)
    table = shown(
        "", (ERROR, MACS), [line, line_of(Row({"network": "paper only"}, (), {"error": 20.0}), [])]
    )
    assert table.header == (
        "network", "method", "error", "error, paper", "error, difference", "MACs", "MACs, paper",
        "seeds",
    )  # fmt: skip
    assert line["row"] == "net, ours"
    assert table.cells == (
        (
            "net", "ours", "29.00 % ± 1.41", "27.50 %", "+1.50", "150.00 M ± 70.71 M", "125.00 M",
            "2",
        ),
        ("paper only", "", "-", "20.00 %", "-", "-", "-", "-"),
    )  # fmt: skip
    plain = shown("", (ERROR, MACS, Column("top5", "top-5 error")), [line], compared=False)
    assert "error, difference" not in plain.header and "error, paper" in plain.header
    assert "top-5 error" not in plain.header  # which nobody has
    steady = line_of(row, [first, {**first, "macs": 1.995e8}])
    assert shown("", (MACS,), [steady]).cells[0][2] == "199.75 M"


def test_the_width_figure_has_the_network_of_normal_width() -> None:
    """At equal MACs it is what the gated ones are to be compared with."""
    first, *others = PAGES["figure-width"].rows(Plan(scale_named("short")))
    assert first.labels == {"widened by": "1", "method": "dense"}
    assert first.runs[0] == "cifar100-resnet18-b-dense-seed0"
    assert [row.labels["widened by"] for row in others] == ["2"] * 3 + ["4"] * 3 + ["8"] * 3


def cost(config: RunConfig, classes: int, size: int) -> tuple[int, float, int]:
    """MACs of all channels, MACs as gates start, weights of convolutions."""
    share = float(str(config.heads.init).removeprefix("split(").removesuffix(")"))
    with torch.device("meta"):
        model = model_from_config(config, classes, size=(size, size), weights=False)
    costs = count_costs(model, size)
    opened = [[float(round(share * width)) for width in model.gating.widths]]
    quadratic = cost_matrix(model.gating, size)
    macs = macs_of_counts(torch.tensor(opened, dtype=torch.float64), quadratic).item()
    return costs.macs, macs + costs.embedding_macs + costs.gate_macs, costs.conv_params


@pytest.fixture(scope="module")
def short() -> dict[str, RunConfig]:
    names = ("table-cifar", "table-widening", "table-imagenet-wide")
    return {name: run.config for name, run in plan_of("short", *names).runs.items()}


@pytest.mark.parametrize("key", STRATEGIES)
def test_widened_networks_cost_what_the_paper_says(key: str, short: dict[str, RunConfig]) -> None:
    _, _, dense, _, gated, share = STRATEGIES[key]
    config = short[f"cifar100-vgg16-{key}-ours-{100 * share:g}-seed0"]
    all_channels, started, weights = cost(config, 100, 32)
    assert all_channels == pytest.approx(dense, rel=0.002)
    assert weights == pytest.approx(24.17e6, rel=0.001)
    assert 0.97 * gated < started <= gated


def test_wide_networks_cost_no_more_than_dense_ones(short: dict[str, RunConfig]) -> None:
    for data, classes in (("cifar10", 10), ("cifar100", 100)):
        whole, started, _ = cost(short[f"{data}-resnet56-wide2-ours-48-seed0"], classes, 32)
        assert whole == pytest.approx(250.5e6, rel=0.001) and 1.2e8 < started <= 125.49e6
    _, started, _ = cost(short["cifar100-resnet110-wide2-ours-48-seed0"], 100, 32)
    assert 2.4e8 < started <= 252.89e6


@pytest.mark.parametrize("row", IMAGENET[2:], ids=lambda row: row[2])
def test_wide_resnet50_costs_what_the_paper_says(row: tuple, short: dict[str, RunConfig]) -> None:
    network, share = row[2], row[3]
    whole, started, _ = cost(
        short[f"imagenet-{network}-wide2-ours-{100 * share:g}-seed0"], 1000, 224
    )
    counted, less = (6.76e9, 0.18) if network.endswith("-b") else (11.40e9, 0.20)
    assert whole == pytest.approx(counted, rel=0.001)
    assert 0.97 * (1 - less) < started / RESNET101_MACS <= 1 - less


def test_the_papers_bound() -> None:
    assert log10_miss([8] * 3, [4] * 3) == pytest.approx(math.log10(math.comb(8, 4) ** -3))
    assert log10_miss([5, 7], [5, 7]) == 0  # all channels run: one choice, which may miss


def test_every_network_has_a_preset() -> None:
    plan = Plan(scale_named("smoke"))
    on = dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet50-b"), "imagenet")
    on |= dict.fromkeys(("drn_a_50", "drn_a_50-b"), "cityscapes")
    for network in NETWORKS:
        assert plan.dense(on.get(network, "cifar100"), network, 0) in plan.runs
    with pytest.raises(UserError, match="no setting of Li"):
        plan.method("cifar10", "vgg16", "li", 1.0, 0, setting="vgg16-z")
