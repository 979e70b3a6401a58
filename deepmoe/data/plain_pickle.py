"""Reads the pickles of CIFAR's archives without running them: no more than plain values.

A pickle is a program that may call anything. This reads one with a machine of its own, which knows
the few steps that real archives consist of, whether Python 2 wrote them or Python 3, with numpy 1
or 2. Values are made here, never by what the pickle names, and no step works through a value's
depth: there is nothing to recurse into.
"""

import math
import pickletools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from deepmoe.errors import UserError

MOST_CHARACTERS = 100  # of a key
MOST_STEPS = 1_000_000  # the largest real file, CIFAR-100's training images, has 300,000


def load_plain_pickle(path: Path, content: bytes) -> dict[str, Any]:
    """The values of a pickled dict: strings, numbers, lists of them, arrays of integers.

    Args:
        path: for error messages.
        content: the pickle itself.

    Raises:
        UserError: where the pickle is truncated, or holds anything that no CIFAR file does.
    """
    try:
        value = _Machine(content).run()
    except UserError as error:
        raise UserError(f"{path} is refused: {error}") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{path} is truncated or not a CIFAR file") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a CIFAR file: it holds a {type(value).__name__}, no dict")
    return {
        key: inner.value if isinstance(inner, _Array) else inner for key, inner in value.items()
    }


class _Global(Enum):
    """What a pickle may name: nothing here can be called, only recognised."""

    RECONSTRUCT = "_reconstruct"
    FROM_BUFFER = "_frombuffer"
    ARRAY_CLASS = "ndarray"
    DTYPE = "dtype"
    ENCODE = "encode"


_GLOBALS = {
    "numpy.core.multiarray _reconstruct": _Global.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Global.RECONSTRUCT,
    "numpy.core.numeric _frombuffer": _Global.FROM_BUFFER,
    "numpy._core.numeric _frombuffer": _Global.FROM_BUFFER,
    "numpy ndarray": _Global.ARRAY_CLASS,
    "numpy dtype": _Global.DTYPE,
    "_codecs encode": _Global.ENCODE,
}


class _Integers:
    """A dtype; the order of its bytes comes after it."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order: str | None = None


class _Array:
    """An array; its content comes after it."""

    def __init__(self, value: np.ndarray | None = None) -> None:
        self.value = value


class _Machine:
    """Values on a stack, and a memo of those that are used again."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.copies = len(content)  # bytes that may still be copied: else a few steps fill memory
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks that wait for their mark's list to be complete
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The pickled value."""
        end = 0
        for step, (opcode, argument, position) in enumerate(pickletools.genops(self.content)):
            if step == MOST_STEPS:
                raise UserError(f"it has more than {MOST_STEPS:,} steps")
            name = opcode.name
            if name in _LITERALS:
                self.stack.append(_plain(argument))
            elif name in _STEPS:
                _STEPS[name](self, argument)
            else:
                raise UserError(f"it has a step {name}, which no CIFAR file needs")
            end = (position or 0) + 1
        if end != len(self.content):
            raise UserError(f"{len(self.content) - end} bytes follow its end")
        (value,) = self.stack
        if self.below:
            raise ValueError("a mark is left")
        return value

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def take(self, count: int) -> list[Any]:
        values = [self.stack.pop() for _ in range(count)]
        return values[::-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("only lists are appended to")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError("only dicts have items")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes) or len(key) > MOST_CHARACTERS:
                raise UserError("a key of a dict is not a short string")
            text = key.decode("latin1") if isinstance(key, bytes) else key
            if text in target:
                raise UserError(f"the key {text!r} appears twice")
            target[text] = value

    def push_dict(self, _: Any) -> None:
        values = self.since_mark()
        self.push({})
        self.set_items(values)

    def remember(self, key: int | None) -> None:
        self.memo[len(self.memo) if key is None else key] = self.stack[-1]

    def name(self, module_and_name: str) -> None:
        if module_and_name not in _GLOBALS:
            asked = module_and_name[:100].replace(" ", ".", 1)
            raise UserError(f"it asks for {asked!r}, which no CIFAR file needs")
        self.push(_GLOBALS[module_and_name])

    def name_from_stack(self, _: Any) -> None:
        module, name = self.take(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("only strings are names")
        self.name(f"{module} {name}")

    def reduce(self, _: Any) -> None:
        """Makes what a call would: of the few that an array takes, with their usual arguments."""
        match self.take(2):
            case [_Global.ENCODE, (str(text), "latin1")]:
                self.push(self.latin1(text))
            case [_Global.RECONSTRUCT, (_Global.ARRAY_CLASS, (0,), "b" | b"b")]:
                self.push(_Array())
            case [_Global.DTYPE, (str(code), 0, 1)]:
                if len(code) != 2 or code[0] not in "iu" or code[1] not in "1248":
                    raise UserError(f"it holds an array of type {code[:40]!r} instead of integers")
                self.push(_Integers(code))
            case [
                _Global.FROM_BUFFER,
                (raw, _Integers() as kind, tuple(shape), "C" | "F" as order),
            ]:
                self.push(_Array(_array(raw, kind, shape, order)))
            case _:
                raise UserError("it makes a value of an unusual kind")

    def build(self, _: Any) -> None:
        """Completes a dtype or an array by its state."""
        (state,) = self.take(1)
        match self.stack[-1], state:
            case _Integers() as kind, (3, "|" | "<" | ">" as order, None, None, None, -1, -1, 0):
                kind.order = order
            case _Array(value=None) as array, (
                1,
                tuple(shape),
                _Integers() as kind,
                0 | 1 as fortran,
                raw,
            ):
                raw = self.latin1(raw) if isinstance(raw, str) else raw
                array.value = _array(raw, kind, shape, "F" if fortran else "C")
            case _:
                raise UserError("it completes a value in an unusual way")

    def latin1(self, text: str) -> bytes:
        """The bytes that a string stands for: Python 2 had no others, and protocol 2 has none."""
        self.copies -= len(text)
        if self.copies < 0:
            raise UserError("it makes more data than it holds")
        return text.encode("latin1")


def _plain(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError("it holds a number of more than 64 bits")
    return value


def _array(raw: Any, kind: _Integers, shape: tuple[Any, ...], order: Any) -> np.ndarray:
    if kind.order is None or not isinstance(raw, bytes | bytearray) or not 1 <= len(shape) <= 2:
        raise UserError("it holds an array of an unusual kind")
    if not all(type(side) is int and side > 0 for side in shape):
        raise UserError("it holds an array of an unusual shape")
    dtype = np.dtype(kind.order + kind.code)
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise UserError(f"an array of {list(shape)} does not consist of {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape, order=order)


# Steps whose argument is the value.
# fmt: off
_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "STRING", "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}
# fmt: on
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, length: None,
    "STOP": lambda machine, _: None,
    "MARK": _Machine.mark,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "LIST": lambda machine, _: machine.push(machine.since_mark()),
    "APPEND": lambda machine, _: machine.append(machine.take(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "DICT": _Machine.push_dict,
    "SETITEM": lambda machine, _: machine.set_items(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "PUT": _Machine.remember,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": _Machine.remember,
    "GET": lambda machine, key: machine.push(machine.memo[key]),
    "BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "LONG_BINGET": lambda machine, key: machine.push(machine.memo[key]),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
