"""Two files compared: tokenizer, shapes, vectors, tensors that are the same, and contents."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from qres.errors import InputError
from qres.gguf import difference, model_file
from qres.gguf.inventory import Inventory
from tests.gguf.building import LLAMA, ROWS, Row, Typed, build, inventory, put, put_split, strings


def first_difference(reference: Inventory, quantized: Inventory) -> str | None:
    """The first one between two tokenizers."""
    return next(iter(difference.tokenizer_differences(reference, quantized)), None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"tokenizer.ggml.padding_token_id": 3}, None),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre is 'qwen2' in the reference, 'llama-bpe' in the quantized file"),
        ({"tokenizer.ggml.tokens": strings(["a", "b"])}, "tokens has 4 entries in the reference, 2 in the quantized"),
        ({"tokenizer.ggml.tokens": strings(["a", "b", "", "e"])}, "tokens[3] is 'é' in the reference, 'e' in the"),
        ({"tokenizer.ggml.merges": "none"}, "merges is a list of 1 in the reference, 'none'"),
        ({"tokenizer.ggml.bos_token_id": 2}, "bos_token_id is 1 in the reference, 2 "),
        ({"tokenizer.ggml.add_bos_token": False}, "add_bos_token is True in the reference, False"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token is not set in the reference, True"),
    ],
)
def test_tokenizer_difference(tmp_path: Path, change: dict[str, object], expected: str | None) -> None:
    other = model_file.read(put(tmp_path, build(LLAMA | change, ROWS, 896), "other.gguf"))
    found = first_difference(inventory(tmp_path), other)
    assert (found is None) if expected is None else (found is not None and expected in found)


def test_vocabulary_sizes_without_tokens(tmp_path: Path) -> None:
    plain = {"general.architecture": "llama", "llama.vocab_size": 7}
    first, second = inventory(tmp_path, plain), inventory(tmp_path, plain | {"llama.vocab_size": 8})
    assert "7 tokens in the reference, 8" in (first_difference(first, second) or "")


def floats(items: Sequence[float], code: str = "f", type_id: int = 6) -> Typed:
    return Typed(9, struct.pack(f"<IQ{len(items)}{code}", type_id, len(items), *items))


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "expected"),
    [
        ("tokens", strings(["a", "b", "\n"]), strings(["a", "b", "\t"]), r"[2] is '\n' in the reference, '\t' in the"),
        ("tokens", strings(["a"]), strings([b"\xff"]), r"[0] is 'a' in the reference, b'\xff' in the quantized file"),
        ("tokens", strings(["x" * 999, "y"]), strings(["x" * 999, "z"]), "[1] is 'y' in the reference, 'z' in the"),
        ("tokens", strings(["x" * 999]), strings(["y" * 999]), f"xxx...{'x' * 49}' in the reference, 'yyy"),
        ("tokens", strings(["x" * (1 << 20) + "y"]), strings(["x" * (1 << 20) + "z"]), " has 1 entries in both files,"),
        ("scores", floats([0, 1.5]), floats([0, 2.5]), "[1] is 1.5 in the reference, 2.5 in the quantized file"),
        ("scores", floats([0.0]), floats([-0.0]), "[0] is 0.0 in the reference, -0.0 in the quantized file"),
        ("scores", floats([1.0]), floats([1.0], "d", 12), " holds float32 in the reference, float64 in the quantized"),
        ("token_type", floats([1, 3], "i", 5), floats([1, 4], "i", 5), "[1] is 3 in the reference, 4 in the quantized"),
        ("pre", "a" * (1 << 21), "a" * (1 << 21) + "b", " has 2097152 bytes in the reference, 2097153 in the"),
        ("pre", "a" * (1 << 21), "b" * (1 << 21), " has 2097152 bytes in both files, but not the same"),
    ],
)
def test_first_differing_entry(tmp_path: Path, key: str, ours: object, theirs: object, expected: str) -> None:
    full = f"tokenizer.ggml.{key}"
    files = [
        put(tmp_path, build(LLAMA | {full: item}, ROWS, 896), f"{i}.gguf") for i, item in enumerate((ours, theirs))
    ]
    found = first_difference(*map(model_file.read, files))
    assert found is not None
    assert found.startswith(full)
    assert expected in found
    assert len(found) < 400


def test_first_differing_entry_of_a_split_model(tmp_path: Path) -> None:
    reference = model_file.read(put_split(tmp_path)[2])
    other = put(
        tmp_path, build(LLAMA | {"tokenizer.ggml.tokens": strings(["a", "c", "", "é"])}, ROWS, 896), "other.gguf"
    )
    assert first_difference(reference, model_file.read(other)) == (
        "tokenizer.ggml.tokens[1] is 'b' in the reference, 'c' in the quantized file"
    )


def test_long_vocabularies_are_compared_without_lists(tmp_path: Path) -> None:
    words = [f"token {i}" for i in range(200_000)]
    files = [
        put(tmp_path, build(LLAMA | {"tokenizer.ggml.tokens": strings([*words, last])}, ROWS, 896), f"{last}.gguf")
        for last in ("this", "that")
    ]
    pair = [model_file.read(path) for path in files]
    tracemalloc.start()
    try:
        assert "tokens[200000] is 'this' in the reference, 'that'" in (first_difference(*pair) or "")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_vanished_file_is_an_input_error(tmp_path: Path) -> None:
    first = inventory(tmp_path)
    path = put(
        tmp_path, build(LLAMA | {"tokenizer.ggml.tokens": strings(["a", "b", "", "e"])}, ROWS, 896), "other.gguf"
    )
    second = model_file.read(path)
    path.unlink()
    for compare in (difference.tokenizer_differences, difference.vector_difference, difference.shared_tensors):
        with pytest.raises(InputError, match=r"cannot read .*other\.gguf"):
            compare(first, second)


def with_data(folder: Path, name: str, changes: Mapping[str, bytes], rows: Sequence[Row] = ROWS) -> Inventory:
    """A file whose tensors are zeros but for what `changes` puts at the end of some of them."""
    path = put(folder, build(LLAMA, rows, 1 << 22), name)
    found = model_file.read(path)
    data = bytearray(path.read_bytes())
    for tensor in found.tensors:
        end = changes.get(tensor.name, b"")
        data[tensor.end - len(end) : tensor.end] = end
    path.write_bytes(data)
    return found


BIG: list[Row] = [("token_embd.weight", (1024, 1024), 1, 0), ("blk.0.attn_norm.weight", (64,), 0, 1 << 21)]


def test_vector_difference(tmp_path: Path) -> None:
    reference = with_data(tmp_path, "a", {"blk.0.attn_norm.weight": b"\1"})
    same = with_data(tmp_path, "b", {"blk.0.attn_norm.weight": b"\1", "token_embd.weight": b"\2"})
    other = with_data(tmp_path, "c", {"blk.0.attn_norm.weight": b"\2"})
    assert difference.vector_difference(reference, same) is None
    assert difference.vector_difference(reference, other) == "blk.0.attn_norm.weight"
    for row in (
        ("blk.0.attn_norm.weight", (64,), 1, 512),  # F16: not left alone, so nothing can be said
        ("blk.0.attn_norm.weight", (32,), 0, 512),
        ("blk.1.attn_norm.weight", (64,), 0, 512),
    ):
        rows = [ROWS[0], row, ROWS[2]]
        assert difference.vector_difference(reference, with_data(tmp_path, "d", {row[0]: b"\2"}, rows)) is None


def test_vector_difference_over_shards(tmp_path: Path) -> None:
    split = model_file.read(put_split(tmp_path)[0])
    assert difference.vector_difference(split, with_data(tmp_path, "a", {})) is None
    assert difference.vector_difference(split, with_data(tmp_path, "b", {ROWS[1][0]: b"\1"})) == ROWS[1][0]


def test_shared_tensors(tmp_path: Path) -> None:
    first = with_data(tmp_path, "a", {"blk.0.ffn_up.weight": b"\1"})
    second = with_data(tmp_path, "b", {"blk.0.ffn_up.weight": b"\2", "blk.0.attn_norm.weight": b"\1"})
    found = difference.shared_tensors(first, second)
    assert (found.tensors, found.of, found.bytes) == (1, 2, 512)  # the embedding; vectors do not count
    found = difference.shared_tensors(first, first)
    assert (found.tensors, found.of, found.bytes) == (2, 2, 600)
    other_type = with_data(tmp_path, "c", {}, [("token_embd.weight", (64, 4), 30, 0), *ROWS[1:2]])
    found = difference.shared_tensors(first, other_type)
    assert (found.tensors, found.of, found.bytes) == (0, 1, 0)


def test_tensors_are_compared_to_their_last_byte(tmp_path: Path) -> None:
    first, same = (with_data(tmp_path, name, {}, BIG) for name in "ab")
    last = with_data(tmp_path, "c", {"token_embd.weight": b"\1"}, BIG)
    behind = with_data(tmp_path, "d", {"blk.0.attn_norm.weight": b"\1"}, BIG)
    assert difference.shared_tensors(first, same).bytes == 1 << 21
    assert difference.shared_tensors(first, last).tensors == 0
    assert difference.shared_tensors(first, behind).tensors == 1


def test_content_digest(tmp_path: Path) -> None:
    first, second = put(tmp_path, bytes(5 << 20), "a"), put(tmp_path, b"end", "b")
    seen: list[tuple[int, int]] = []
    digest = difference.content_digest([first, second], lambda done, total: seen.append((done, total)))
    assert digest == hashlib.sha256(bytes(5 << 20) + b"end").hexdigest()
    total = (5 << 20) + 3
    assert seen == [(4 << 20, total), (5 << 20, total), (total, total)]
    assert difference.content_digest(second) == hashlib.sha256(b"end").hexdigest()
    with pytest.raises(InputError, match="cannot read"):
        difference.content_digest(tmp_path / "missing")


# ---------------------------------------------------------------- what a file holds otherwise at the same type


def test_c20_changes_name_the_tensors_that_differ_at_the_same_type(tmp_path: Path) -> None:
    reference = with_data(tmp_path, "a", {})
    names = [row[0] for row in ROWS]
    same = difference.changes(reference, with_data(tmp_path, "b", {}))
    assert same == difference.Changes((), (), 2, is_copy=True)
    found = difference.changes(reference, with_data(tmp_path, "c", {names[0]: b"\1", names[1]: b"\1"}))
    assert found == difference.Changes(tuple(names[:2]), tuple(names[:2]), 2, is_copy=False)


def test_c5_a_copy_has_all_tensors_at_the_same_types(tmp_path: Path) -> None:
    reference = with_data(tmp_path, "a", {})
    (name, shape, _, start), *rest = ROWS
    assert not difference.changes(reference, with_data(tmp_path, "b", {}, [(name, shape, 30, start), *rest])).is_copy
    assert not difference.changes(reference, with_data(tmp_path, "c", {}, ROWS[:2])).is_copy
    assert not difference.changes(with_data(tmp_path, "d", {}, ROWS[:2]), reference).is_copy
    split = model_file.read(put_split(tmp_path)[0])
    assert difference.changes(split, with_data(tmp_path, "e", {})).is_copy


def test_changes_leave_rope_factors_and_other_types_out(tmp_path: Path) -> None:
    rows: list[Row] = [*ROWS, ("rope_freqs.weight", (32,), 0, 1 << 12), ("output.weight", (64, 4), 8, 1 << 13)]
    reference = with_data(tmp_path, "a", {}, rows)
    found = difference.changes(reference, with_data(tmp_path, "b", {"rope_freqs.weight": b"\1"}, rows))
    assert (found.tensors, found.of_exact, found.is_copy) == ((), 2, False)
    found = difference.changes(reference, with_data(tmp_path, "c", {"output.weight": b"\1"}, rows))
    assert (found.tensors, found.exact) == (("output.weight",), ())  # quantized twice: not the same blocks


def test_changes_of_a_file_that_has_gone_are_refused(tmp_path: Path) -> None:
    reference, other = with_data(tmp_path, "a", {}), with_data(tmp_path, "b", {})
    other.path.unlink()
    with pytest.raises(InputError, match="cannot read"):
        difference.changes(reference, other)
