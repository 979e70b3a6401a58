"""The verbs that describe models and presets, and train nothing."""

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.common import json_option, parse_size, parse_widths, set_option
from deepmoe.cli.examples import example
from deepmoe.console import print_table, say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.model import DeepMoE


def network_options(command: Callable[..., None]) -> Callable[..., None]:
    """What says which network is meant."""
    for option in reversed(
        (
            click.argument("model"),
            click.option(
                "--wide", type=float, default=1.0, help="Factor to widen gated layers by."
            ),
            click.option("--block", help="Residual block: basic, bottleneck-a or bottleneck-b."),
            click.option("--widths", help="Widths by name (w13-all) or as a list (64,64,128,...)."),
            click.option("--classes", type=int, help="Number of classes. [default: the model's]"),
            click.option(
                "--input", "size", metavar="PX", help="Image size: pixels a side, or HEIGHTxWIDTH."
            ),
        )
    ):
        command = option(command)
    return command


@click.command(**example("deepmoe macs resnet50 --wide 2"))
@network_options
@json_option
def macs(
    model: str,
    wide: float,
    block: str | None,
    widths: str | None,
    classes: int | None,
    size: str | None,
    as_json: bool,
) -> None:
    """Count the parameters and MACs of MODEL, without gates.

    MODEL is a name from the zoo, timm:NAME, torchvision:NAME, hf:FOLDER_OR_ID or
    package.module:factory.
    """
    import torch

    from deepmoe.costs import count_costs

    with torch.device("meta"):  # shapes are enough to count
        network, (height, width) = _make(model, wide, block, widths, classes, size, "inner")
    costs = dataclasses.asdict(count_costs(network, (height, width)))
    values = {
        "model": model,
        "input": height if height == width else [height, width],
        "classes": network.classes,
        **costs,
    }
    if as_json:
        say(json.dumps(values, indent=2))
    else:
        rows = [(key, f"{v:,}" if isinstance(v, int) else str(v)) for key, v in values.items()]
        print_table(("", ""), rows)


@click.command(**example("deepmoe describe timm:resnet50 --gates all"))
@network_options
@click.option(
    "--gates", default="inner", show_default=True, help="inner, all, or layer names: a,b,c."
)
@click.option("--layers", "with_layers", is_flag=True, help="Also list all layers.")
@click.option(
    "--check",
    "with_check",
    is_flag=True,
    help="Also check gates, channel removal, MAC counts and the sparse engine.",
)
@json_option
def describe(
    model: str,
    wide: float,
    block: str | None,
    widths: str | None,
    classes: int | None,
    size: str | None,
    gates: str,
    with_layers: bool,
    with_check: bool,
    as_json: bool,
) -> None:
    """Show MODEL's groups of channels, its gates and costs.

    Groups that can't have gates are listed with the reason. MODEL is a name from the zoo,
    timm:NAME, torchvision:NAME, hf:FOLDER_OR_ID or package.module:factory.
    """
    import torch

    from deepmoe.checking import check
    from deepmoe.description import description

    torch.manual_seed(0)
    network, pixels = _make(model, wide, block, widths, classes, size, gates)
    values = {"model": model, **description(network, pixels)}
    passed = True
    if with_check and network.gated:
        with torch.device("cpu"):
            found = check(network.eval(), torch.randn(2, network.gating.graph.colours, *pixels))
        values["check"], passed = found.as_dict(), found.passed
    if as_json:
        say(json.dumps(values, indent=2))
    else:
        _print_description(values, with_layers)
    if not passed:
        raise UserError(f"{model} fails a check of its gates, see FAIL above")


def _make(
    name: str,
    wide: float,
    block: str | None,
    widths: str | None,
    classes: int | None,
    size: str | None,
    gates: str,
) -> "tuple[DeepMoE, tuple[int, int]]":
    """The network that is meant, and the size of its images."""
    from deepmoe.config import ModelConfig
    from deepmoe.configured_models import model_options
    from deepmoe.graph import NothingToGate
    from deepmoe.registry import create_model, usual_input

    chosen = ModelConfig(name, wide=wide, block=block, widths=parse_widths(widths))  # type: ignore[arg-type]
    asked = None if size is None else parse_size(size)
    where = gates if gates in ("inner", "all") else gates.split(",")
    options: dict[str, Any] = {"classes": classes, "size": asked, **model_options(chosen)}
    try:
        network = create_model(name, gates=where, **options)
    except NothingToGate:
        network = create_model(name, gates=None, **options)
    return network, asked or usual_input(network)


def _print_description(values: dict[str, Any], with_layers: bool) -> None:
    from deepmoe.costs import format_macs

    total = values["macs"]
    height, width = values["input"]
    say(
        f"{values['model']}: {format_macs(total)} MACs and {values['params'] / 1e6:.2f} M "
        f"parameters for an image of {height}x{width} px, {values['classes']:,} classes"
    )
    if values["gates"]:
        routing = (values["embedding_macs"] + values["gate_macs"]) / total
        say(
            f"{values['gates']:,} gates in {values['gated_groups']} "
            f"group{'s' if values['gated_groups'] != 1 else ''}; layers with "
            f"{values['gated_share']:.1%} of the MACs lie under them; embedding and gates cost "
            f"another {routing:.1%}"
        )
    else:
        say("nothing in it can be gated")
    rows = [
        (
            group["name"],
            f"{group['gates']:,}",
            f"{group['macs'] / total:.1%}",
            "gated" if group["gated"] else f"no: it {group['why_not']}",
            _first(group["made_by"][1:]),
            _first(group["read_by"]),
        )
        for group in values["groups"]
    ]
    print_table(("group", "channels", "MACs", "gate", "also made by", "read by"), rows)
    say("MACs: of the layers that make or read a group, so that most layers count twice")
    if with_layers:
        layers = [
            (x["name"], x["kind"], x["inputs"], x["outputs"], f"{x['macs'] / total:.1%}")
            for x in values["layers"]
        ]
        print_table(("layer", "kind", "inputs", "outputs", "MACs"), layers)
    for rule in values.get("check", {}).get("rules", []):
        say(f"{'ok  ' if rule['passed'] else 'FAIL'} {rule['name']}: {rule['found']}")


def _first(names: list[str]) -> str:
    """A list in little space."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more if names else ""


@click.command(**example("deepmoe models --json"))
@json_option
def models(as_json: bool) -> None:
    """List the models with their input size, parameters and MACs."""
    from deepmoe.costs import format_macs, zoo_costs

    listed = zoo_costs()
    if as_json:
        say(json.dumps(listed, indent=2))
        return
    rows = [
        (
            m["model"],
            m["input"],
            str(m["classes"]),
            str(m["gates"]),
            f"{m['params'] / 1e6:.2f} M",
            format_macs(m["macs"]),
            f"{m['embedding_macs'] / m['macs']:.1%}",
        )
        for m in listed
    ]
    print_table(("model", "input", "classes", "gates", "params", "MACs", "embedding"), rows)


@click.command(**example("deepmoe config quickstart --set train.epochs=5"))
@click.argument("preset", required=False)
@set_option
def config(preset: str | None, overrides: tuple[str, ...]) -> None:
    """Print PRESET as TOML with every key, or list all presets."""
    from deepmoe.config import config_to_toml, load_config, preset_comment, preset_names

    if preset is None:
        say("\n".join(preset_names()))
    else:
        resolved = config_to_toml(load_config(preset, overrides))
        say(preset_comment(preset) + resolved, end="")
