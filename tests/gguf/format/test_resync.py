"""The next row is found behind a value that cannot be read."""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qres.gguf import model_file
from qres.gguf.format.metadata import Unreadable
from tests.effort import lines_run
from tests.gguf.building import LLAMA, ROWS, VALID, Typed, build, odd, parsed, put, string


def damaged_array(count: int | None = None, element_type: int = 8, word: bytes = b"\0\0\0\0\0\0\0\0") -> bytes:
    """A model whose vocabulary of 2000 words, which look much like keys, is damaged in one place."""
    words = [f"word{i}.x" for i in range(1000)] + ["", "\1", "abc", "d"] * 250
    payload = b"".join(map(string, words)).replace(string("word500.x"), word + b"word500.x", 1)
    tokens = Typed(9, struct.pack("<IQ", element_type, 2000 if count is None else count) + payload)
    return build(LLAMA | {"tokenizer.ggml.tokens": tokens}, ROWS, 896)


@pytest.mark.parametrize(
    ("change", "type_id", "message"),
    [
        ({"count": 2**62}, 9, r"claims 4611686018427387904 elements in metadata value 'tokenizer.ggml.tokens'"),
        ({"count": 2300}, 9, r"'tokenizer.ggml.tokens' needs \d+ bytes"),
        ({"element_type": 99}, 99, "unknown value type 99"),
        ({"word": b"\xff" * 8}, 9, r"'tokenizer.ggml.tokens' needs 18446744073709551615 bytes"),
    ],
)
def test_damaged_vocabulary_costs_nothing_else(change: dict[str, Any], type_id: int, message: str) -> None:
    whole, found = parsed(VALID), parsed(damaged_array(**change))
    assert found.metadata == {**whole.metadata, "tokenizer.ggml.tokens": Unreadable(type_id)}
    assert [t.name for t in found.tensors] == [t.name for t in whole.tensors]
    assert len(found.problems) == 1
    assert re.search(message, found.problems[0].message)


def test_last_value_of_a_vocabulary_only_file() -> None:
    data = odd("tokenizer.ggml.add_bos_token", build({"a.key": 1, "tokenizer.ggml.add_bos_token": True, "a.last": 2}))
    assert parsed(data).metadata == {"a.key": 1, "tokenizer.ggml.add_bos_token": Unreadable(77), "a.last": 2}
    data = odd("a.last", build({"a.key": 1, "a.last": 2}))
    assert parsed(data).metadata == {"a.key": 1, "a.last": Unreadable(77)}


def test_without_a_next_row_the_loss_is_said(tmp_path: Path) -> None:
    far = build(LLAMA | {"llama.embedding_length": Typed(77, bytes(1 << 21))}, ROWS, 896)  # beyond the search
    found = model_file.read(put(tmp_path, far), tolerant=True)
    assert list(found.metadata)[-1] == "llama.embedding_length"
    assert found.tensors == ()
    assert [p.message.split(": ")[1] for p in found.problems] == [
        "metadata value 'llama.embedding_length' has the unknown value type 77",
        "it claims 15 metadata values and 3 tensors, 6 and 0 were found",
    ]


def test_search_ends_soon_in_bytes_made_to_mislead(tmp_path: Path) -> None:
    row = string("a") + b"\1"
    data = build([(f"k{i}.", Typed(77, row * (1 << 17))) for i in range(4)], ROWS, 896)
    assert parsed(data).problems
    assert lines_run(partial(parsed, data)) < 2 * len(data)  # measured: 0.8
