"""Pickles of the public archives are read; whatever else one may hold is one sentence."""

import os
import pickle
import pickletools
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmoe.data import plain_pickle
from deepmoe.data.plain_pickle import load_plain_pickle
from deepmoe.errors import UserError

IMAGES = np.arange(12, dtype=np.uint8).reshape(2, 6)
HONEST = {"data": IMAGES, "labels": [3, 200, 70000, -1], "filenames": ["a.png", "a.png", "é"]}


def load(content: bytes) -> dict[str, Any]:
    return load_plain_pickle(Path("batch"), content)


def text(value: str) -> bytes:
    """As Python 2 pickles a string."""
    return b"U" + bytes([len(value)]) + value.encode()


# Steps of the official archives, with the state of dtype and array left open.
DTYPE = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R"
USUAL = b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"


def array(shape: bytes = b"K\x02K\x06\x86", order: bytes = b"\x89", dtype: bytes = b"") -> bytes:
    raw = b"T" + struct.pack("<i", IMAGES.size) + IMAGES.tobytes()
    return EMPTY + b"(K\x01" + shape + (dtype or DTYPE + USUAL) + order + raw + b"tb"


def official(data: bytes, labels: bytes = b"]q\x02(K\x03K\x05e") -> bytes:
    """A batch as cPickle of Python 2 wrote it, protocol 2."""
    items = text("batch_label") + text("training batch 1 of 5") + text("data") + data
    return b"\x80\x02}q\x01(" + items + text("labels") + labels + b"u."


def test_the_official_layout() -> None:
    value = load(official(array()))
    np.testing.assert_array_equal(value["data"], IMAGES)
    assert value["data"].dtype == np.uint8
    assert (value["labels"], value["batch_label"]) == ([3, 5], "training batch 1 of 5")
    by_columns = load(official(array(b"K\x06K\x02\x86", b"I01\n")))["data"]
    np.testing.assert_array_equal(by_columns, IMAGES.T)


def test_names_as_text() -> None:  # protocol 0 of Python 2
    value = load(
        b"(dp1\nS'label_names'\np2\n(lp3\nS'cat'\np4\naS'dog'\np5\nasS'num_vis'\nI3072\ns."
    )
    assert value == {"label_names": ["cat", "dog"], "num_vis": 3072}


@pytest.mark.parametrize("numpy_1", [False, True])
@pytest.mark.parametrize("keys", ["str", "bytes"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_python_3(protocol: int, keys: str, numpy_1: bool) -> None:
    arrays = {"by columns": np.asfortranarray(IMAGES), "sliced": IMAGES[:, ::2], "big": None}
    arrays["big"] = np.arange(5, dtype=">i4")
    batch: dict[Any, Any] = HONEST | arrays
    if keys == "bytes":
        batch = {key.encode(): value for key, value in batch.items()}
    content = pickle.dumps(batch, protocol=protocol)
    if numpy_1 and protocol < 4:  # later ones tell the length, too
        content = content.replace(b"numpy._core", b"numpy.core")
    value = load(content)
    assert {type(key) for key in value} == {str}
    for key, expected in (HONEST | arrays).items():
        np.testing.assert_array_equal(value[key], expected)


def test_two_arrays_may_share_a_type_and_a_name_of_numpy_1() -> None:
    content = pickle.dumps({"a": IMAGES, "b": IMAGES[::-1]}, protocol=5)
    content = content.replace(b"\x13numpy._core.numeric", b"\x12numpy.core.numeric")
    content = content.replace(b"\x16numpy._core.multiarray", b"\x15numpy.core.multiarray")
    value = load(content)
    np.testing.assert_array_equal(value["b"], value["a"][::-1])


def dtype_with(state: bytes) -> bytes:
    return official(array(dtype=DTYPE + b"(" + state + b"tb"))


SUBARRAY = b"K\x03" + text("|") + b"(" + DTYPE + b"M\xe8\x03\x85tNNJ\x00\x04\x00\x00K\x01K\x00"
REFUSED = {
    "a dtype of subarrays, which reads other memory": dtype_with(SUBARRAY),
    "a dtype of a huge size": dtype_with(
        b"K\x03" + text("|") + b"NNNJ\xff\xff\xff\x7fJ\x01\x00\x00\x00K\x00"
    ),
    "a dtype of objects": official(array(dtype=DTYPE.replace(text("u1"), text("O8")) + USUAL)),
    "a dtype that calls itself u1 and more": official(
        array(dtype=DTYPE.replace(text("u1"), text("u1,u1")) + USUAL)
    ),
    "a dtype without its state": official(array(dtype=DTYPE)),
    "an array of another class": official(array().replace(b"numpy\nndarray", b"numpy\ndtype")),
    "an array that is larger than its bytes": official(array(b"K\x02K\x07\x86")),
    "an array that is smaller than its bytes": official(array(b"K\x02K\x05\x86")),
    "an array of negative sides": official(array(b"J\xfe\xff\xff\xffJ\xfa\xff\xff\xff\x86")),
    "an array of sides that wrap around": official(
        array(
            b"\x8a\x08"
            + struct.pack("<q", 2**62)
            + b"\x8a\x08"
            + struct.pack("<q", 2**62)
            + b"\x86"
        )
    ),
    "an array that is completed twice": official(array() + array()[len(EMPTY) :]),
    "an array of one list's depth": official(EMPTY + b"]q\x07h\x07ab"),
    "a number of 2**31 bits": official(b"\x8b" + struct.pack("<i", 2**20) + b"\x01" * 2**20),
    "a number of 4000 digits": official(b"L" + b"9" * 4000 + b"L\n"),
    "a float": official(b"G" + bytes(8)),
    "bytes after the end": official(array()) + b"more",
    "the end in between": official(array() + b"."),
    "a key that is a list": b"}(]K\x01u.",
    "a key that holds itself": b"]q\x00h\x00\x85q\x01a}h\x01K\x01s.",
    "a key of 500,000 tuples": b"})" + b"\x85" * 500_000 + b"K\x01s.",
    "a key that is a number": b"}K\x01K\x01s.",
    "a long key": b"}(X" + struct.pack("<i", 10**5) + b"x" * 10**5 + b"Nu.",
    "a key that is there twice": b"}(" + text("data") + b"N" + text("data") + b"Nu.",
    "os.system": b"cposix\nsystem\n(S'true'\ntR.",
    "os.system by its parts": b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
    "an attribute of what may be named": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.fromfile\x93.",
    "a registered extension": b"\x82\x01.",
    "a persistent name": b"Pthere\n.",
    "a persistent value": b"K\x01Q.",
    "an instance": b"(inumpy\nndarray\n.",
    "an instance of what lies on the stack": b"(cnumpy\nndarray\no.",
    "a new object": b"cnumpy\nndarray\n)\x81.",
    "a new object by keywords": b"cnumpy\nndarray\n)}\x92.",
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "a set": b"\x80\x04\x8f.",
    "text in another encoding": b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
    "more steps than any archive": b"\x80\x02" + b"N" * 1_100_000 + b".",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_archive_holds_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match=r"^batch is refused: [^\n]{10,120}$"):
        load(REFUSED[kind])


DAMAGED = {
    "nothing": b"",
    "no end": official(array())[:-1],
    "a number of a million digits": official(b"L" + b"9" * 10**6 + b"L\n"),
    "a string of negative length": official(b"T\xff\xff\xff\xff"),
    "a string beyond the end": official(b"T\xff\xff\xff\x7fx"),
    "bytes beyond all ends": official(b"\x8e" + b"\xff" * 8),
    "a step without values": b"R.",
    "a list without a mark": b"e.",
    "a mark that is left": b"}(.",
    "two values": b"}}.",
    "an unknown step": b"\xff.",
    "a value that was never noted": b"h\x09.",
    "a key without a value": b"}(" + text("data") + b"u.",
    "items of a list": b"](" + text("data") + b"Nu.",
    "what is appended to a dict": b"}Na.",
    "broken UTF-8": official(b"X\x02\x00\x00\x00\xff\xff"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_pickles_are_called_so(kind: str) -> None:
    with pytest.raises(UserError, match=r"^batch is (truncated or not a CIFAR file|refused: .*)$"):
        load(DAMAGED[kind])


def test_a_value_that_is_used_again_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten times a list of ten times a list...: 10**20 values, if anything went through them all.
    laughs = b"]q\x00(" + b"K\x01" * 10 + b"e"
    for i in range(1, 20):
        laughs += b"]" + b"q" + bytes([i]) + b"(" + (b"h" + bytes([i - 1])) * 10 + b"e"
    value = load(b"}(" + text("labels") + b"(" + laughs + b"l" + text("self") + b"]q\x63h\x63au.")
    assert len(value["labels"]) == 20 and value["self"][0] is value["self"]
    # A long string, made into bytes once for every seven bytes of the file.
    monkeypatch.setattr(plain_pickle, "MOST_STEPS", 10**9)
    long = b"X" + struct.pack("<i", 10**5) + b"x" * 10**5
    again = b"(" + b"c_codecs\nencode\nq\x01" + long + b"q\x02U\x06latin1\x86q\x03R"
    with pytest.raises(UserError, match="makes more data than it holds"):
        load(again + b"h\x01h\x03R" * 10**4 + b"l.")


class Evil:
    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


@pytest.mark.parametrize(
    "attack",
    [
        Evil(os.system, "touch {target}"),
        Evil(eval, "__import__('pathlib').Path('{target}').touch()"),
        Evil(subprocess.call, ["touch", "{target}"]),
        Evil(np.fromfile, "/etc/hostname"),
        Evil(np.dtype, "O"),
    ],
    ids=["os.system", "eval", "subprocess", "numpy.fromfile", "object arrays"],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_called(attack: Evil, protocol: int, tmp_path) -> None:
    target = tmp_path / "owned"
    call = [str(c).format(target=target) if isinstance(c, str) else c for c in attack.call]
    with pytest.raises(UserError, match="is refused"):
        load(pickle.dumps({"data": Evil(*call)}, protocol=protocol))
    assert not target.exists()


def check(content: bytes) -> None:
    """Any bytes give a dict of no more than they hold, or one sentence."""
    try:
        value = load(content)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert isinstance(value, dict)
    for inner in value.values():
        if isinstance(inner, np.ndarray):
            assert inner.nbytes <= len(content) and inner.dtype.kind in "iu"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    check(content)


SAMPLES = [pickle.dumps(HONEST, protocol=p) for p in (0, 2, 5)] + [official(array())]


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_honest_pickles_with_changed_bytes(data: st.DataObject) -> None:
    content = data.draw(st.sampled_from(SAMPLES))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.integers(0, 6)))
        content = content[:start] + data.draw(st.binary(max_size=6)) + content[end:]
    check(content)


def steps(content: bytes) -> list[bytes]:
    starts = [position for _, _, position in pickletools.genops(content)]
    return [content[a:b] for a, b in zip(starts, [*starts[1:], len(content)], strict=True)]


STEPS = sorted({step for content in SAMPLES for step in steps(content)} - {b"."})


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(STEPS) | st.binary(max_size=3), max_size=40))
def test_known_steps_in_any_order(order: list[bytes]) -> None:
    check(b"".join(order) + b".")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_honest_pickles_with_steps_changed(data: st.DataObject) -> None:
    order = steps(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(order)))
        end = start + data.draw(st.integers(0, 3))
        order[start:end] = data.draw(st.lists(st.sampled_from([*STEPS, *order]), max_size=3))
    check(b"".join(order))
