"""Networks of other packages, by name: they are imported when they are named, and not before."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepmoe.console import complain
from deepmoe.errors import UserError, reason
from deepmoe.progress import progress

USUAL_SIZE = (224, 224)
DETECTION_OPERATORS = ("nms", "qnms")  # that torchvision asks for when it is imported
_DECLARED: list[torch.library.Library] = []  # operators last as long as their library
FORMS = "timm:NAME, torchvision:NAME, hf:FOLDER_OR_ID or package.module:factory"


def is_source(name: str) -> bool:
    """Whether a name stands for a network that is not the zoo's own."""
    return ":" in name


def make_network(name: str, classes: int | None, *, pretrained: bool) -> nn.Module:
    """Builds a network of another package.

    Args:
        name: `timm:NAME`, `torchvision:NAME`, `hf:FOLDER_OR_ID` or `package.module:factory`.
        classes: given to a factory that takes it; others have as many as their weights know.
        pretrained: load trained weights, from the package's own place for them.

    Raises:
        UserError: where the package or the network is missing, or can't be built.
    """
    source, _, own_name = name.partition(":")
    make = _SOURCES.get(source)
    try:
        with progress(f"making {name}"):
            network = make(own_name, pretrained) if make else _by_factory(name, classes)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"{name} needs {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:  # of anybody's code
        kind, why = type(error).__name__, reason(error, 200)
        if "torchvision::" in why:  # built for another torch: its operators could not be loaded
            raise UserError(
                f"{name} can't be made: torchvision does not fit torch {torch.__version__}; "
                f"install both again, from the same index ({why})"
            ) from error
        raise UserError(f"{name} can't be made: {kind}: {why}") from error
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} gives a {type(network).__name__}, not a torch.nn.Module")
    return network


def usual_size(network: nn.Module) -> tuple[int, int]:
    """Height and width of the images that a network is meant for, as far as it says."""
    settings: Any = getattr(network, "pretrained_cfg", None) or {}
    if isinstance(settings, dict) and "input_size" in settings:  # timm
        return tuple(settings["input_size"][-2:])
    size = getattr(getattr(network, "config", None), "image_size", None)  # Hugging Face
    if isinstance(size, int):
        return size, size
    return tuple(size[-2:]) if isinstance(size, list | tuple) and len(size) >= 2 else USUAL_SIZE


def import_torchvision() -> None:
    """Lets torchvision be imported where its compiled part was built for another torch.

    timm and others import it too, for networks that are plain PyTorch. What is missing then are
    operators of object detection: they are declared here, and fail if they are run.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return  # whoever needs it says so
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        _DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in DETECTION_OPERATORS:
            _DECLARED[-1].define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # what the first attempt has left behind
        importlib.import_module("torchvision")
        complain(
            f"torchvision was built for another torch than {torch.__version__}: its networks work, "
            "its detection operators do not"
        )


def _from_timm(name: str, pretrained: bool) -> nn.Module:
    import_torchvision()
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        raise UserError(f"timm has no model named {name!r}")
    return timm.create_model(name, pretrained=pretrained)


def _from_torchvision(name: str, pretrained: bool) -> nn.Module:
    import_torchvision()
    models = importlib.import_module("torchvision.models")
    if name not in models.list_models():
        raise UserError(f"torchvision has no model named {name!r}")
    return models.get_model(name, weights="DEFAULT" if pretrained else None)


def _from_hugging_face(name: str, pretrained: bool) -> nn.Module:
    import_torchvision()
    transformers = importlib.import_module("transformers")
    auto = transformers.AutoModelForImageClassification
    # A folder holds weights, or a configuration alone.
    weights = any(Path(name).glob("*.safetensors")) or any(Path(name).glob("*.bin"))
    if pretrained or weights:
        return auto.from_pretrained(name)
    return auto.from_config(transformers.AutoConfig.from_pretrained(name))


def _by_factory(name: str, classes: int | None) -> Any:
    module_name, _, factory_name = name.partition(":")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name):
        raise UserError(f"{name!r} names no network; it should be {FORMS}")
    here = str(Path.cwd())
    if here not in sys.path:  # a command finds the modules beside it, as a script would
        sys.path.append(here)
    factory = getattr(importlib.import_module(module_name), factory_name, None)
    if not callable(factory):
        raise UserError(f"{module_name} has no function or class {factory_name!r}")
    return factory(classes) if classes is not None and _takes_classes(factory) else factory()


def _takes_classes(factory: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(factory).parameters.values())
    return bool(parameters) and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


_SOURCES: dict[str, Callable[[str, bool], nn.Module]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "hf": _from_hugging_face,
}
