"""`deepmoe bench`: speed, as ratios from one interleaved run."""

import functools
import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepmoe.cli.checkpoints import check_overrides, open_checkpoint
from deepmoe.cli.common import (
    as_typed,
    data_option,
    json_option,
    network_option,
    next_command,
    parse_numbers,
    parse_size,
    save_option,
    set_option,
)
from deepmoe.cli.examples import example
from deepmoe.console import say
from deepmoe.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepmoe.bench.benchmark import Benchmark
    from deepmoe.bench.subjects import Subject

ROUNDS = 15  # timed runs, unless asked for others

details_option = click.option(
    "--details", "with_details", is_flag=True, help="Also print every measurement."
)


@click.group()
def bench() -> None:
    """Measure latency and training time on this machine.

    What is compared takes turns in one process, so a busy machine slows all of it.
    """


@bench.command("train", **example("deepmoe bench train quickstart --rounds 2"))
@click.argument("preset")
@set_option
@click.option("--rounds", type=int, default=5, help="Timed epochs of each kind.", show_default=True)
@details_option
@json_option
@save_option
def bench_train_verb(
    preset: str,
    overrides: tuple[str, ...],
    rounds: int,
    with_details: bool,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time epochs of PRESET: dense twin, joint and frozen stage.

    On a GPU, also tells the memory that each of them needs.
    """
    from deepmoe.bench.train import bench_train
    from deepmoe.config import load_config

    config = load_config(preset, overrides)
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}")
    found = bench_train(config, rounds)
    values = found.as_dict()
    if save is not None:
        from deepmoe.results import write_result

        changes = "".join(f" --set '{o}'" for o in overrides if not o.startswith("data.root"))
        command = f"deepmoe bench train {preset}{changes} --rounds {rounds}"
        write_result(save, values, command=command, seed=config.train.seed, device=values["device"])
    if as_json:
        say(json.dumps(values, indent=2))
        return
    _tell([found], with_details)


@bench.command("sparse", **example("deepmoe bench sparse vgg16 --wide 2 --density 0.5"))
@click.argument("model")
@data_option
@network_option
@click.option("--wide", type=float, default=1.0, help="Factor to widen gated layers by.")
@click.option("--block", help="Residual block: basic, bottleneck-a or bottleneck-b.")
@click.option(
    "--density",
    default="0.5",
    show_default=True,
    help="Share of channels that run; several with commas.",
)
@click.option("--batch", default="1", show_default=True, help="Batch size; several with commas.")
@click.option("--codes", type=int, help="Also measure a codebook of this many routes.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if available]")
@click.option("--input", "size", metavar="PX", help="Image size: pixels a side, or HEIGHTxWIDTH.")
@click.option("--rounds", type=int, default=ROUNDS, show_default=True, help="Timed runs of each.")
@click.option(
    "--compile/--no-compile",
    "compile_dense",
    default=True,
    help="Also try torch.compile on dense networks.",
)
@click.option(
    "--save-plan", type=click.Path(path_type=Path), help="Save which kernels were fastest."
)
@details_option
@json_option
@save_option
def bench_sparse_verb(
    model: str,
    overrides: tuple[str, ...],
    network: str | None,
    wide: float,
    block: str | None,
    density: str,
    batch: str,
    codes: int | None,
    device: str | None,
    size: str | None,
    rounds: int,
    compile_dense: bool,
    save_plan: Path | None,
    with_details: bool,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time MODEL, dense and sparse.

    MODEL is a name or a checkpoint. A name makes an untrained network with random gates. A
    checkpoint runs with its own gates and exits, on its own data or the data that --set data...
    names. Several densities and batch sizes are measured in every combination. A saved plan is used
    by sparsify(model, plan=FILE).
    """
    import torch

    from deepmoe.bench.sparse import bench_sparse
    from deepmoe.bench.subjects import trained_subject
    from deepmoe.devices import choose_device
    from deepmoe.files import check_replaceable
    from deepmoe.sparse.planner import START

    device = choose_device(device).type
    # A checkpoint that is not there is told so, and not taken for the name of a model.
    trained = Path(model).is_file() or Path(model).suffix == ".safetensors"
    _check_options(trained)
    check_overrides(overrides)
    if save_plan is not None:
        check_replaceable(save_plan, START)
    densities = [None] if trained else parse_numbers("--density", density, float)
    batches = parse_numbers("--batch", batch, int)
    if rounds < 1 or min(batches) < 1:
        raise UserError("--rounds and --batch must be at least 1")

    def subject(share: float | None, images: int) -> "Subject":
        if share is None:
            options = {"codes": codes, "device": device, "data": overrides, "network": network}
            return trained_subject(Path(model), batch=images, **options)  # type: ignore[arg-type]
        return _untrained(model, wide, block, share, images, codes, size, device)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = [
        bench_sparse(subject(d, b), dtype=dtype, rounds=rounds, compile_dense=compile_dense)
        for d in densities
        for b in batches
    ]
    if save_plan is not None:
        functools.reduce(operator.or_, [one.plan for one in found]).save(save_plan)
    measured = [one.as_dict() for one in found]
    values = measured[0] if len(measured) == 1 else measured
    if save is not None:
        from deepmoe.results import write_result

        command = _sparse_command(trained, device, **click.get_current_context().params)
        write_result(save, values, command=command, seed=0, device=device)
    if as_json:
        say(json.dumps(values, indent=2))
        return
    _tell(found, with_details)
    if trained:
        next_command("deepmoe export", Path(model), network)


def _sparse_command(trained: bool, on: str, **given: Any) -> str:
    """The command that was typed, but for places on this machine."""
    command = _command(
        f"deepmoe bench sparse {Path(given['model']).name}",
        wide=given["wide"] if given["wide"] != 1 else None,
        block=given["block"],
        density=None if trained else given["density"],
        batch=given["batch"],
        codes=given["codes"],
        device=on,
        input=given["size"],
        rounds=given["rounds"] if given["rounds"] != ROUNDS else None,
    )
    return command + as_typed(given["overrides"]) + " --no-compile" * (not given["compile_dense"])


def _check_options(trained: bool) -> None:
    """Refuses what says nothing of a checkpoint, or of a name."""
    given = click.get_current_context().get_parameter_source
    unfit = ("wide", "block", "density", "size") if trained else ("overrides", "network")
    for name in unfit:
        if given(name) is click.core.ParameterSource.COMMANDLINE:
            option = {"size": "input", "overrides": "set"}.get(name, name)
            kind = "a checkpoint, which has its own" if trained else "the name of a model"
            raise UserError(f"--{option} does not go with {kind}")


def _untrained(
    name: str,
    wide: float,
    block: str | None,
    density: float,
    batch: int,
    codes: int | None,
    size: str | None,
    device: str,
) -> "Subject":
    from deepmoe.bench.subjects import untrained_subject
    from deepmoe.config import ModelConfig
    from deepmoe.configured_models import model_options

    return untrained_subject(
        name,
        density=density,
        batch=batch,
        codes=codes,
        size=None if size is None else parse_size(size),
        device=device,
        options=model_options(ModelConfig(wide=wide, block=block)),  # type: ignore[arg-type]
    )


@bench.command("exits", **example("deepmoe bench exits exits.safetensors --threads 1"))
@click.argument("checkpoint", type=click.Path(path_type=Path))
@data_option
@network_option
@click.option("--batch", default="1", show_default=True, help="Batch size; several with commas.")
@click.option("--images", type=int, help="So many of the images, evenly spread. [default: all]")
@click.option("--threads", type=int, help="CPU threads. [default: PyTorch's choice]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: the checkpoint's]")
@details_option
@json_option
@save_option
def bench_exits_verb(
    checkpoint: Path,
    overrides: tuple[str, ...],
    network: str | None,
    batch: str,
    images: int | None,
    threads: int | None,
    device: str | None,
    with_details: bool,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time CHECKPOINT with and without its early exits.

    Images are those of its evaluation data, in the sparse engine. Every batch runs both ways, one
    right after the other. A model without gates is compared with its base network alone.
    """
    import torch

    from deepmoe.bench.exits import bench_exits, threads_of_cpu
    from deepmoe.evaluation.batches import EvenlySpread

    batches = parse_numbers("--batch", batch, int)
    for name, numbers in (("batch", batches), ("images", [images]), ("threads", [threads])):
        if any(number is not None and number < 1 for number in numbers):
            raise UserError(f"--{name} must be at least 1")
    where = () if device is None else (f"train.device={device}",)
    opened = open_checkpoint(checkpoint, (*overrides, *where), network)
    loaded, data = opened.checkpoint, opened.data
    if loaded.model.exit_at is None:
        raise UserError(f"{checkpoint} has no exits: add some with deepmoe exits")
    there = min(data.evaluation.images, images or data.evaluation.images)
    if max(batches) > there:
        raise UserError(f"there are only {there} images: --batch can be at most {there}")
    dtype = torch.bfloat16 if opened.precision == "bf16-mixed" else None
    # The first ones of a folder are of one class, which may be easier than others.
    chosen = data.evaluation if images is None else EvenlySpread(data.evaluation, there)
    with threads_of_cpu(threads):
        on = data.evaluation_name
        found = [
            bench_exits(
                loaded.model,
                chosen,
                batch=b,
                dtype=dtype,
                evaluated_on=on,
            )
            for b in batches
        ]
    values = [one.as_dict() for one in found]
    if save is not None:
        from deepmoe.results import write_result

        command = _command(
            f"deepmoe bench exits {checkpoint.name}",
            batch=batch,
            images=images,
            threads=threads,
            device=opened.device.type,
        )
        seed = loaded.config.train.seed
        write_result(
            save, values, command=command + as_typed(overrides), seed=seed, device=opened.device
        )
    if as_json:
        say(json.dumps(values, indent=2))
        return
    _tell(found, with_details)
    next_command("deepmoe export", checkpoint, network)


def _tell(found: "Sequence[Benchmark]", with_details: bool) -> None:
    for one in found:
        say(one)
        if with_details:
            say(one.details())


def _command(verb: str, **options: Any) -> str:
    """A command as it would be typed; options that are `None` were not given."""
    given = {name: value for name, value in options.items() if value is not None}
    return " ".join([verb, *(f"--{name} {value}" for name, value in given.items())])
