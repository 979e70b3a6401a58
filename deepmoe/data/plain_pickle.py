"""Reads pickles from strangers: dicts, lists, strings, numbers and uint8 arrays, nothing else."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from deepmoe.errors import UserError


def load_plain_pickle(path: Path, content: bytes) -> dict[str, Any]:
    """Unpickles a dict of plain values, as CIFAR's archives hold; never calls foreign code.

    Args:
        path: for error messages.
        content: the pickle itself.

    Raises:
        UserError: where the pickle is truncated, or asks for anything but plain values.
    """
    try:
        # The public archives were written by Python 2, whose strings are bytes.
        value = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    except UserError as error:
        raise UserError(f"{path} is refused: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{path} is truncated or not a CIFAR file") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a CIFAR file: it holds a {type(value).__name__}, no dict")
    return value


def _reconstruct(kind: Any, shape: Any, _typecode: Any) -> np.ndarray:
    if kind is not np.ndarray or shape != (0,):
        raise UserError("the pickle builds an array of an unusual kind")
    return np.empty(0, dtype=np.uint8)


def _dtype(code: Any, *_: Any) -> np.dtype:
    if code not in ("u1", "|u1"):
        raise UserError(f"the pickle holds an array of type {code!r} instead of uint8")
    return np.dtype(np.uint8)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise UserError("the pickle encodes something other than latin1 text")
    return text.encode("latin1")


# What a uint8 array pickles to, under the module names of numpy 1 and 2. The stand-ins do the one
# harmless thing that the real callables would, and refuse the rest.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise UserError(
                f"the pickle asks for {module}.{name}, which no CIFAR file needs"
            ) from None
