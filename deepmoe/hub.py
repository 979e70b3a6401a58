"""Models in folders and on the Hugging Face Hub: weights as safetensors, the rest as JSON."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from deepmoe.checkpoint import TrainState, load_checkpoint, save_checkpoint
from deepmoe.config import GIVEN, DataConfig, RunConfig, config_to_dict
from deepmoe.configured_models import config_of
from deepmoe.data import DataInfo
from deepmoe.data.torch_datasets import UNKNOWN_MEAN, UNKNOWN_STD
from deepmoe.errors import UserError, reason
from deepmoe.extras import require
from deepmoe.model import DeepMoE
from deepmoe.registry import usual_input

require("hub", "huggingface_hub")
from huggingface_hub import ModelHubMixin, constants, hf_hub_download  # noqa: E402
from huggingface_hub.errors import HfHubHTTPError  # noqa: E402

CONFIG_NAME = constants.CONFIG_NAME
WEIGHTS_NAME = constants.SAFETENSORS_SINGLE_FILE


class HubModel(
    ModelHubMixin,
    library_name="deepmoe",
    tags=["deepmoe", "dynamic-networks"],
    pipeline_tag="image-classification",
):
    """A model as the hub knows it. Its file of weights is a checkpoint that every verb takes.

    It has no arguments, since the mixin would take them from config.json, whoever wrote that.

    Attributes:
        model: what is saved, or was loaded.
        info: names of its classes, and how its images are normalised.
    """

    model: DeepMoE
    info: DataInfo

    def __init__(self) -> None: ...

    @classmethod
    def of(cls, model: DeepMoE, info: DataInfo | None) -> "HubModel":
        """A model to be saved."""
        made = cls()
        made.model, made.info = model, info or _plain_info(model)
        return made

    def _save_pretrained(self, save_directory: Path) -> None:
        config = config_of(self.model, RunConfig(data=DataConfig(name=GIVEN)))
        path = save_directory / WEIGHTS_NAME
        save_checkpoint(path, self.model, config, self.info, TrainState())
        text = json.dumps(_told(self.model, config, self.info), indent=2)
        (save_directory / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        network: str | nn.Module | None = None,
        device: str = "cpu",
        **others: Any,
    ) -> "HubModel":
        others.pop("self", None)  # the only name that config.json could smuggle in
        if others:
            raise UserError(f"from_pretrained takes no argument named {next(iter(others))}")
        path = Path(model_id) / WEIGHTS_NAME
        if not Path(model_id).is_dir():
            path = Path(
                hf_hub_download(
                    model_id,
                    WEIGHTS_NAME,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                )
            )
        loaded = load_checkpoint(path, device, network=network)
        return cls.of(loaded.model, loaded.info)


def save_pretrained(model: DeepMoE, folder: str | Path, info: DataInfo | None, **hub: Any) -> None:
    """Writes a model into a folder; see `DeepMoE.save_pretrained`."""
    try:
        HubModel.of(model, info).save_pretrained(folder, **hub)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def push_to_hub(model: DeepMoE, repo_id: str, info: DataInfo | None, **hub: Any) -> str:
    """Uploads a model; see `DeepMoE.push_to_hub`."""
    return HubModel.of(model, info).push_to_hub(repo_id, **hub)


def from_pretrained(name: str | Path, **hub: Any) -> DeepMoE:
    """Reads a model from a folder or the hub; see `DeepMoE.from_pretrained`."""
    try:
        return HubModel.from_pretrained(name, **hub).model
    except UserError:
        raise
    except (HfHubHTTPError, OSError, ValueError) as error:  # also of a name that can't be
        raise UserError(f"there is no model at {name}: {reason(error, 200)}") from error


def _told(model: DeepMoE, config: RunConfig, info: DataInfo) -> dict[str, Any]:
    """What a person wants to know of a model; the weights' own header is what is read."""
    tables = config_to_dict(config)
    # In six digits: what it is stored in gives more, which nobody has chosen.
    found = {"exit_at": model.exit_at, "exit_vote": model.exit_vote}
    exits = {name: round(float(value), 6) for name, value in found.items() if value is not None}
    return {
        "library_name": "deepmoe",
        **{name: tables[name] for name in ("model", "embedding", "heads") if name in tables},
        **exits,
        "classes": list(info.class_names),
        "image_size": list(info.size),
        "image_mean": list(info.mean),
        "image_std": list(info.std),
    }


def _plain_info(model: DeepMoE) -> DataInfo:
    names = tuple(map(str, range(model.classes)))
    return DataInfo(names, usual_input(model), UNKNOWN_MEAN, UNKNOWN_STD)
