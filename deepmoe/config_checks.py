"""What a configuration may hold: ranges of numbers, settings that go together. No torch here."""

from typing import TYPE_CHECKING

from deepmoe.errors import UserError

if TYPE_CHECKING:
    from deepmoe.config import ModelConfig, RunConfig

ON_THE_WAY = ("fbs", "rnp")  # kinds of heads whose gates are made while the network runs
TINY, HUGE = 1e-12, 1e12
MOST_EMBEDDING_LAYERS = 16
FEWEST_EXPERTS, MOST_EXPERTS = 2, 64
SCHEDULES = ("loss.sparsity", "loss.embedding")  # numbers, or points (epoch, number)
RANGES: dict[str, tuple[float, float]] = {
    "model.wide": (1e-3, 1e3),
    "embedding.dim": (1, 1e5),
    "embedding.widths": (1, 1e5),
    "embedding.shrink": (1, 1e3),
    "embedding.prune": (TINY, 1),
    "heads.share": (TINY, 1),
    "heads.spread": (0, 1e3),
    "heads.groups": (1, 1e3),
    "heads.hidden": (1, 1e5),
    "heads.penalty": (-HUGE, -TINY),
    "heads.lr_scale": (0, HUGE),
    "data.size": (1, 1e5),
    "data.holdout": (0, HUGE),
    "data.crop_padding": (0, 1e3),
    "data.resize": (1, 1e5),
    "data.min_area": (TINY, 1),
    "data.color_jitter": (0, 1),
    "data.lighting": (0, 10),
    "data.crop": (1, 1e5),
    "data.scale": (1e-2, 1e2),
    "data.shift": (0, 1e4),
    "data.workers": (0, 1e3),
    "data.unreadable_limit": (0, 1),
    "loss.sparsity": (0, HUGE),
    "loss.embedding": (0, HUGE),
    "loss.balance": (0, HUGE),
    "loss.agent": (0, HUGE),
    "loss.label_smoothing": (0, 1),
    "loss.distillation": (0, 1),
    "loss.distillation_temperature": (TINY, 1e3),
    "loss.embedding_distillation": (0, 1),
    "loss.norm_sparsity": (0, HUGE),
    "train.epochs": (0, 1e6),
    "train.finetune_epochs": (0, 1e6),
    "train.batch_size": (2, 1e7),  # batch norm needs more than one image
    "train.lr": (TINY, 1e3),
    "train.lr_decay": (0, 1),
    "train.warmup": (TINY, 1),
    "train.finetune_lr": (0, 1e3),
    "train.momentum": (0, 1),
    "train.weight_decay": (0, 1e3),
    "train.seed": (0, 2**32 - 1),
    "train.prune": (TINY, 1),
    "train.prune_widths": (1, 1e6),
    "train.prune_tilt": (0, 1),
    "train.target_macs": (TINY, 1e18),
    "train.budget_ramp": (0, 1),
    "train.channel_floor": (TINY, 1),
    "train.codes": (1, 65536),
    "train.loss_limit": (TINY, HUGE),
    "train.evaluate_epochs": (1, 1e6),
    "train.checkpoint_epochs": (1, 1e6),
    "train.checkpoint_minutes": (TINY, HUGE),
    "train.keep_checkpoints": (0, 1e6),
}


def check_config(config: "RunConfig") -> None:
    """Raises a UserError for a configuration that no run can have."""
    _check_ranges(config)
    _check_learning(config)
    _check_embedding(config)
    _check_stages(config)
    if config.heads.kind == "scale":
        _check_factors(config)
    if config.model.experts is not None:
        _check_run_of_experts(config)
    _check_heads_on_the_way(config)


def _check_ranges(config: "RunConfig") -> None:
    for key, (low, high) in RANGES.items():
        table, _, name = key.partition(".")
        value = getattr(getattr(config, table), name)
        if key in SCHEDULES and isinstance(value, tuple):
            value = tuple(level for _, level in value)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not low <= number <= high:
                shown = number if isinstance(number, float) or abs(number) < 1e18 else "so large"
                raise UserError(f"{key} must lie from {low:g} to {high:g}, not be {shown}")
    if config.embedding.widths is not None and len(config.embedding.widths) > MOST_EMBEDDING_LAYERS:
        raise UserError(f"embedding.widths has at most {MOST_EMBEDDING_LAYERS} numbers")
    for key, pair in (
        ("data.scale", config.data.scale),
        ("train.budget_ramp", config.train.budget_ramp),
    ):
        if pair[0] > pair[1]:
            raise UserError(f"{key} must rise, not fall: {list(pair)}")


def _check_learning(config: "RunConfig") -> None:
    if config.train.nesterov and not config.train.momentum:
        raise UserError("train.nesterov needs a train.momentum above 0")
    if (config.train.teacher is None) != (config.loss.distillation == 0):
        raise UserError("set both train.teacher and loss.distillation, or neither")
    if config.train.teacher is None and config.loss.embedding_distillation:
        raise UserError("loss.embedding_distillation needs a train.teacher")
    if config.train.prunes and config.train.start is None:
        raise UserError(
            "train.prune removes channels from the network of train.start: set that, too"
        )
    if config.train.prune is not None and config.train.prune_widths is not None:
        raise UserError("set train.prune or train.prune_widths, not both")


def _check_embedding(config: "RunConfig") -> None:
    embedding = config.embedding
    if embedding.form != "network" and (embedding.prune or embedding.kept):
        raise UserError('embedding.prune is for embedding.form = "network"')
    left = embedding.kept or (embedding.prune and config.train.start)
    if embedding.form == "network" and not left:
        raise UserError(
            'embedding.form = "network" prunes a trained network: set train.start, and '
            "embedding.prune to a share of its MACs"
        )


def _check_stages(config: "RunConfig") -> None:
    if not config.train.total_epochs:
        raise UserError("train.epochs and train.finetune_epochs must not both be 0")
    if not config.train.epochs and config.train.start is None:
        raise UserError("without a joint stage (train.epochs = 0), set train.start")
    pruned = config.train.prunes or config.embedding.prune is not None
    if not config.train.epochs and pruned and config.model.gates != "none":
        raise UserError("after pruning, gates must be trained: set train.epochs above 0")
    if config.train.codes is not None and not config.train.finetune_epochs:
        raise UserError("train.codes needs a frozen stage: set train.finetune_epochs")
    if config.train.codes is not None and config.model.gates == "none":
        raise UserError("train.codes needs a gated model, but model.gates is none")


def _check_heads_on_the_way(config: "RunConfig") -> None:
    kind = config.heads.kind
    if kind not in ON_THE_WAY or config.model.gates == "none":
        return
    asked = {
        "train.codes": config.train.codes is not None,
        "model.exits": config.model.exits,
        'embedding.form = "network"': config.embedding.form == "network",
    }
    for key, wanted in asked.items():
        if wanted:
            raise UserError(
                f'heads.kind = "{kind}" makes gates of features, without an embedding: it does '
                f"not go with {key}"
            )
    if kind == "rnp" and config.train.epochs == 1:
        raise UserError(
            'heads.kind = "rnp" trains agent and network in turn: set train.epochs to 2 or more'
        )


def _check_factors(config: "RunConfig") -> None:
    """Scaling factors are alike for all images: what is made for gates of an image does not fit."""
    if isinstance(config.loss.sparsity, tuple):
        raise UserError("scaling factors shrink by one loss.sparsity, not by a schedule")
    train, wrong = config.train, None
    wrong = "train.target_macs" if train.target_macs is not None else wrong
    wrong = "train.codes" if train.codes is not None else wrong
    wrong = "train.prune" if train.prunes or config.embedding.prune is not None else wrong
    wrong = "model.exits" if config.model.exits else wrong
    if wrong is not None:
        raise UserError(f'heads.kind = "scale" does not go with {wrong}: prune by sss afterwards')


def check_experts(model: "ModelConfig") -> None:
    """Refuses experts that no model has: too many of them, or gates and exits besides."""
    experts = model.experts
    if not isinstance(experts, int) or not FEWEST_EXPERTS <= experts <= MOST_EXPERTS:
        shown = experts if isinstance(experts, int) and abs(experts) < 1e18 else "so many"
        raise UserError(
            f"model.experts must lie from {FEWEST_EXPERTS} to {MOST_EXPERTS}, not be {shown}"
        )
    if model.gates != "none" or model.exits:
        raise UserError(
            "experts have neither gates nor exits: with model.experts, set model.gates=none and "
            "model.exits=false"
        )


def _check_run_of_experts(config: "RunConfig") -> None:
    check_experts(config.model)
    train, embedding = config.train, config.embedding
    if train.prunes or embedding.prune is not None or embedding.form == "network":
        raise UserError(
            "experts start from a network that is already trained (and pruned): leave out "
            'train.prune, embedding.prune and embedding.form = "network"'
        )
    if train.target_macs is not None:
        raise UserError(
            "train.target_macs steers gates, and experts have none: they cost what train.start does"
        )
    if train.compile == "on":
        raise UserError(
            "experts can't be compiled, since each image chooses its own: set train.compile to "
            "auto or off"
        )
