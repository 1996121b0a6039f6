"""Metadata values: digests, texts, values of unknown types."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from qres.errors import InputError
from qres.gguf import model_file
from qres.gguf.format.metadata import Digest, Unreadable
from tests.gguf.building import EVERY_TYPE, LLAMA, ROWS, VALID, Typed, build, inventory, odd, parsed, put, string

# ---------------------------------------------------------------- valid files


def test_nested_array_and_long_string_are_digests(tmp_path: Path) -> None:
    nested = Typed(
        9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) + struct.pack("<IQ", 8, 1) + string("x")
    )
    found = inventory(tmp_path, {"general.architecture": "llama", "a.nested": nested, "a.long": "x" * (1 << 20 | 1)})
    kept = found.metadata["a.nested"]
    assert isinstance(kept, Digest)
    assert (kept.length, kept.element_type) == (2, "array")
    long = hashlib.sha256(b"x" * (1 << 20 | 1)).hexdigest()
    assert found.metadata["a.long"] == Digest((1 << 20) + 1, "byte", long)


# ---------------------------------------------------------------- tolerant reading


@pytest.mark.parametrize("key", [key for key in LLAMA if key != "general.architecture"])
def test_value_of_unknown_type_costs_nothing_else(tmp_path: Path, key: str) -> None:
    path = put(tmp_path, odd(key, VALID))
    found, whole = model_file.read(path, tolerant=True), parsed(VALID)
    assert found.metadata == {**whole.metadata, key: Unreadable(77)}
    assert list(found.metadata) == list(whole.metadata)
    assert found.tensors == whole.tensors
    (problem,) = found.problems
    assert problem.message.endswith(f"metadata value {key!r} has the unknown value type 77")
    with pytest.raises(InputError) as caught:
        model_file.read(path)
    assert str(caught.value) == f"{path} is {problem.message} ({problem.hint})"


@pytest.mark.parametrize("key", list(EVERY_TYPE)[1:])
def test_any_value_can_be_skipped(key: str) -> None:
    whole, found = parsed(build(EVERY_TYPE, ROWS, 896)), parsed(odd(key, build(EVERY_TYPE, ROWS, 896)))
    assert found.metadata == {**whole.metadata, key: Unreadable(77)}
    assert found.tensors == whole.tensors


def test_text_that_is_not_utf8_is_no_reason_to_refuse(tmp_path: Path) -> None:
    path = put(tmp_path, build(LLAMA | {"general.author": Typed(8, string(b"Jos\xe9"))}, ROWS, 896))
    found = model_file.read(path)  # llama.cpp takes it, too
    assert found.metadata["general.author"] == "Jos\N{REPLACEMENT CHARACTER}"
    (problem,) = found.problems
    assert not problem.fatal
    assert "'general.author' holds text that is not UTF-8" in problem.message
