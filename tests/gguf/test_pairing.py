"""Tensors of two files paired: shapes, other layouts of the same weights, tied heads, blocks that never run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from qres.gguf.pairing import executed, not_executed, pair
from tests.gguf.building import LLAMA, ROWS, Row, inventory
from tests.gguf.test_difference import with_data

HEAD: Row = ("output.weight", (64, 4), 1, 1024)


@pytest.mark.parametrize(
    ("reference", "quantized", "expected"),
    [
        (ROWS, ROWS, ""),
        (ROWS, list(reversed(ROWS)), ""),  # order and types may differ
        (ROWS, [*ROWS, HEAD], ""),  # a head of its own where the reference's is tied
        (ROWS, ROWS[:2], "'blk.0.ffn_up.weight' is missing in the quantized"),
        (ROWS[:2], ROWS, "'blk.0.ffn_up.weight' is missing in the reference"),
        (ROWS, [("token_embd.weight", (64, 3), 1, 0), *ROWS[1:]], "shape [64, 4] in the reference, [64, 3] in"),
        (ROWS, [*ROWS, ("rope_freqs.weight", (4,), 0, 1024)], ""),  # whether it is read is for the graphs to say
        ([*ROWS, ("rope_freqs.weight", (4,), 0, 1024)], ROWS, ""),
        (ROWS, [*ROWS[:1], ("blk.0.attn_norm.weight", (64, 1), 0, 512), *ROWS[2:]], ""),
    ],
)
def test_shapes(tmp_path: Path, reference: Sequence[Row], quantized: Sequence[Row], expected: str) -> None:
    found = pair(inventory(tmp_path, rows=reference), inventory(tmp_path, rows=quantized)).problem
    assert expected in found
    assert bool(found) == bool(expected)


def test_another_architecture_with_other_tensors(tmp_path: Path) -> None:
    other = inventory(tmp_path, LLAMA | {"general.architecture": "qwen2"}, ROWS[:2])
    assert "'llama' in the reference, 'qwen2'" in pair(inventory(tmp_path), other).problem
    alike = inventory(tmp_path, LLAMA | {"general.architecture": "qwen2"})
    assert pair(inventory(tmp_path), alike).problem == ""  # the graphs say whether it is the same function


def test_another_number_of_layers(tmp_path: Path) -> None:
    other = inventory(tmp_path, LLAMA | {"llama.block_count": 30}, ROWS[:1])
    assert pair(inventory(tmp_path), other).problem == (
        "the model has 2 layers in the reference, 29 in the quantized file"
    )
    unknown = inventory(tmp_path, {"general.architecture": "llama"})
    assert pair(inventory(tmp_path), unknown).problem == ""


def test_a_head_that_equals_the_embedding_is_the_tied_head(tmp_path: Path) -> None:
    data = {"token_embd.weight": b"\1", "output.weight": b"\1"}
    tied = with_data(tmp_path, "tied", data)
    equal = with_data(tmp_path, "equal", data, [*ROWS, HEAD])
    own = with_data(tmp_path, "own", {**data, "output.weight": b"\2"}, [*ROWS, HEAD])
    found = pair(equal, tied)
    assert found.problem == ""
    assert found.places["output.weight"].tensors == ("token_embd.weight",)
    assert "'output.weight' is missing in the quantized file" in pair(own, tied).problem
    assert pair(tied, own).problem == ""


def cut(name: str, lengths: Sequence[int], type_id: int, at: int) -> Row:
    return (f"blk.0.{name}", tuple(lengths), type_id, at)


F16, Q8_0 = 1, 8
PARTS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "attn_qkv.weight": [("attn_q.weight", (64, 64)), ("attn_k.weight", (64, 32)), ("attn_v.weight", (64, 32))],
    "attn_qkv.bias": [("attn_q.bias", (64,)), ("attn_k.bias", (32,)), ("attn_v.bias", (32,))],
    "ffn_gate_up_exps.weight": [("ffn_gate_exps.weight", (64, 96, 3)), ("ffn_up_exps.weight", (64, 96, 3))],
    "attn_kv_b.weight": [("attn_k_b.weight", (32, 64, 2)), ("attn_v_b.weight", (64, 64, 2))],
}
WHOLES: dict[str, tuple[int, ...]] = {
    "attn_qkv.weight": (64, 128),
    "attn_qkv.bias": (128,),
    "ffn_gate_up_exps.weight": (64, 192, 3),
    "attn_kv_b.weight": (64, 192),
}


@pytest.mark.parametrize("whole", PARTS)
def test_the_same_weights_in_other_tensors(tmp_path: Path, whole: str) -> None:
    apart = inventory(tmp_path, rows=[*ROWS, *(cut(name, shape, F16, 0) for name, shape in PARTS[whole])])
    fused = inventory(tmp_path, rows=[*ROWS, cut(whole, WHOLES[whole], Q8_0, 0)])
    there, back = pair(apart, fused), pair(fused, apart)
    assert (there.problem, back.problem) == ("", "")
    (tensor,) = (one for one in fused.tensors if one.name == f"blk.0.{whole}")
    places = [there.places[f"blk.0.{name}"] for name, _ in PARTS[whole]]
    assert {place.type for place in places} == {"Q8_0"}
    assert sum(place.n_bytes for place in places) == tensor.n_bytes
    assert {place.tensors for place in places} == {(f"blk.0.{whole}",)}
    assert back.places[f"blk.0.{whole}"].tensors == tuple(f"blk.0.{name}" for name, _ in PARTS[whole])
    if whole.endswith(".weight"):
        assert whole.removesuffix(".weight") in there.remark
        assert "(1 layer)" in back.remark


def test_parts_of_another_size_are_another_model(tmp_path: Path) -> None:
    apart = inventory(tmp_path, rows=[*ROWS, *(cut(name, shape, F16, 0) for name, shape in PARTS["attn_qkv.weight"])])
    fused = inventory(tmp_path, rows=[*ROWS, cut("attn_qkv.weight", (64, 96), F16, 0)])
    assert "'blk.0.attn_q.weight' is missing in the quantized file" in pair(apart, fused).problem


NEXTN = {"llama.block_count": 2, "llama.nextn_predict_layers": 1}


def test_a_block_that_never_runs_is_not_compared(tmp_path: Path) -> None:
    extra = [("blk.1.nextn.eh_proj.weight", (128, 64), 1, 1024), ("blk.1.attn_norm.weight", (64,), 0, 1024)]
    trunk = inventory(tmp_path, LLAMA | {"llama.block_count": 1, "llama.nextn_predict_layers": 0})
    whole = inventory(tmp_path, LLAMA | NEXTN, [*ROWS, *extra])
    assert (pair(trunk, whole).problem, pair(whole, trunk).problem) == ("", "")
    (found,) = not_executed(whole)
    assert (found.block, found.tensors, found.bytes) == (1, 2, 128 * 64 * 2 + 64 * 4)
    assert not_executed(trunk) == ()
    assert [tensor.name for tensor in executed(whole)] == [tensor.name for tensor in trunk.tensors]
