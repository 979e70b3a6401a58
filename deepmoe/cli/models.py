"""The verbs that tell of models and presets, and train nothing."""

import dataclasses
import json

import click

from deepmoe.cli.common import json_option, parse_size, parse_widths, set_option
from deepmoe.console import print_table, say


@click.command()
@click.argument("model")
@click.option("--wide", type=float, default=1.0, help="Factor on the gated widths.")
@click.option("--block", help="Residual block: basic, bottleneck-a or bottleneck-b.")
@click.option("--widths", help="Widths by name (w13-all) or as a list (64,64,128,...).")
@click.option("--classes", type=int, help="Number of classes. [default: the model's usual]")
@click.option("--input", "size", metavar="PX", help="Pixels a side, or HEIGHTxWIDTH.")
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
    """Count parameters and MACs of MODEL, ungated, at an input size."""
    import torch

    from deepmoe.config import ModelConfig
    from deepmoe.costs import count_costs
    from deepmoe.registry import create_model, model_entry, model_options

    entry = model_entry(model)
    height, width = entry.input_size if size is None else parse_size(size)
    chosen = ModelConfig(model, wide=wide, block=block, widths=parse_widths(widths))  # type: ignore[arg-type]
    with torch.device("meta"):  # shapes are enough to count
        network = create_model(model, classes=classes, **model_options(chosen))
    costs = dataclasses.asdict(count_costs(network, (height, width)))
    values = {
        "model": model,
        "input": height if height == width else [height, width],
        "classes": network.backbone.classes,
        **costs,
    }
    if as_json:
        say(json.dumps(values, indent=2))
    else:
        rows = [(key, f"{v:,}" if isinstance(v, int) else str(v)) for key, v in values.items()]
        print_table(("", ""), rows)


@click.command()
@json_option
def models(as_json: bool) -> None:
    """List the models, with their usual input and their counts."""
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


@click.command()
@click.argument("preset", required=False)
@set_option
def config(preset: str | None, overrides: tuple[str, ...]) -> None:
    """Print PRESET resolved, as TOML, and its comment; without a name, list the presets."""
    from deepmoe.config import config_to_toml, load_config, preset_comment, preset_names

    if preset is None:
        say("\n".join(preset_names()))
    else:
        resolved = config_to_toml(load_config(preset, overrides))
        say(preset_comment(preset) + resolved, end="")
