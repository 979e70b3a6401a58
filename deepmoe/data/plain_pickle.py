"""Reads pickles from strangers: dicts, lists, strings, integers, arrays of integers; no more."""

import io
import pickle
import re
from functools import partial
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
    return {_text(key): inner for key, inner in value.items()}


def _text(key: Any) -> Any:
    return key.decode("latin1") if isinstance(key, bytes) else key


_ARRAY_CLASS = object()  # stands for numpy.ndarray, which could otherwise be called


def _reconstruct(kind: Any, shape: Any, _typecode: Any) -> np.ndarray:
    if kind is not _ARRAY_CLASS or shape != (0,):
        raise UserError("the pickle builds an array of an unusual kind")
    return np.empty(0, dtype=np.uint8)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, np.dtype):
        raise UserError("the pickle builds an array of an unusual kind")
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _dtype(code: Any, *_: Any) -> np.dtype:
    if not isinstance(code, str) or not re.fullmatch(r"[<>|=]?[iu][1248]", code):
        raise UserError(f"the pickle holds an array of type {code!r} instead of integers")
    return np.dtype(code)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise UserError("the pickle encodes something other than latin1 text")
    return text.encode("latin1")


# What an array of integers pickles to, in any protocol, under the module names of numpy 1 and 2.
# The stand-ins do the one harmless thing that the real callables would, and refuse the rest.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _ARRAY_CLASS,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            admitted = _ADMITTED[module, name]
        except KeyError:
            raise UserError(
                f"the pickle asks for {module}.{name}, which no CIFAR file needs"
            ) from None
        # A fresh object each time: a pickle may set attributes of what it is given.
        return partial(admitted) if callable(admitted) else admitted
