"""Keys of two files that a graph may depend on."""

from __future__ import annotations

from pathlib import Path

import pytest

from qres.gguf.hyperparameters import differences
from tests.gguf.building import LLAMA, inventory

HEADS = {"llama.attention.head_count": 4, "llama.embedding_length": 64}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({}, {}, []),
        ({"llama.rope.freq_base": 1e4}, {}, []),  # what llama.cpp takes anyway
        ({"llama.rope.freq_base": 1e6}, {}, ["llama.rope.freq_base is 1000000 in the reference, not set (llama.cpp"]),
        (
            {},
            {"llama.rope.freq_base": 5e5},
            ["is not set (llama.cpp then takes 10000) in the reference, 500000 in the"],
        ),
        ({"llama.a": 1.0}, {"llama.a": 1}, []),  # another type, the same number
        ({"llama.a": 1.0}, {"llama.a": True}, ["llama.a is 1 in the reference, True in the file"]),
        ({"llama.a": 1.00000001}, {"llama.a": 1.0}, []),
        ({"llama.a": "x"}, {}, ["llama.a is 'x' in the reference, not set in the file"]),
        (
            {"llama.a": 1, "llama.b": 2},
            {"llama.b": 3, "llama.c": 4},
            ["llama.a is 1", "llama.b is 2", "llama.c is not"],
        ),
        ({"general.a": 1, "tokenizer.b": 1}, {}, []),
        ({"llama.block_count": 9, "llama.vocab_size": 9, "llama.nextn_predict_layers": 1}, {}, []),
        (HEADS, {**HEADS, "llama.attention.head_count_kv": 4, "llama.rope.dimension_count": 16}, []),
        (
            HEADS,
            {**HEADS, "llama.attention.head_count_kv": 2},
            ["llama.attention.head_count_kv is not set (llama.cpp "],
        ),
        ({"llama.a": float("nan")}, {"llama.a": float("nan")}, []),
    ],
)
def test_differences(tmp_path: Path, ours: dict[str, object], theirs: dict[str, object], expected: list[str]) -> None:
    plain = {"general.architecture": "llama"}
    found = [str(one) for one in differences(inventory(tmp_path, plain | ours), inventory(tmp_path, plain | theirs))]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True)), found


def test_keys_of_another_architecture_are_compared_without_its_name(tmp_path: Path) -> None:
    other = {key.replace("llama.", "qwen2."): value for key, value in LLAMA.items()} | {
        "general.architecture": "qwen2",
        "qwen2.rope.freq_base": 1e6,
    }
    (found,) = differences(inventory(tmp_path), inventory(tmp_path, other))
    assert found.key == "llama.rope.freq_base"
