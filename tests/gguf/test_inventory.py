"""What an inventory says of itself: what is quantized in it, and whether it is an original."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qres.gguf.format.tensor import Tensor
from qres.gguf.inspection import inspect
from qres.gguf.inventory import Inventory
from tests.gguf.choice_of_types import tensor

EXPERTS = tuple(f"blk.{i}.ffn_{part}_exps.weight" for i in range(2) for part in ("gate", "up", "down"))
ATTENTION = tuple(f"blk.{i}.attn_q.weight" for i in range(2))


def inventory(*tensors: Tensor, file_type: str = "MXFP4_MOE") -> Inventory:
    return Inventory(
        path=Path("m.gguf"), shards=(Path("m.gguf"),), version=3, kind="model", architecture="gpt-oss", name="m",
        file_type=file_type, n_layer=2, n_embd=256, n_ctx_train=512, n_vocab=8, tensors=tensors, file_bytes=1,
        metadata={},
    )  # fmt: skip


def released(experts: str = "MXFP4", rest: str = "BF16", **changes: str) -> Inventory:
    matrices = [tensor((256, 256, 4), experts, name) for name in EXPERTS]
    others = [tensor((256, 256), rest, name) for name in ATTENTION]
    norm = tensor((256,), "F32", "blk.0.attn_norm.weight")
    return inventory(*matrices, *others, norm, **changes)


@pytest.mark.parametrize("file_type", ["MXFP4_MOE", "BF16", "F16", ""])
@pytest.mark.parametrize("rest", ["BF16", "F16", "F32"])
def test_c7_experts_at_mxfp4_with_the_rest_at_16_bit_are_as_released(file_type: str, rest: str) -> None:
    found = released(rest=rest, file_type=file_type)
    assert found.released_in == "MXFP4"
    assert found.is_original
    assert not found.is_16bit
    assert dict(found.quantized) == dict.fromkeys(EXPERTS, "MXFP4")


def test_c7_matrices_of_blocks_at_nvfp4_are_as_released() -> None:
    assert released("NVFP4", file_type="NVFP4").released_in == "NVFP4"
    dense = inventory(tensor((256, 256), "NVFP4", ATTENTION[0]), tensor((256, 8), "BF16", "token_embd.weight"))
    assert dense.released_in == ""  # the file says MXFP4_MOE
    assert dataclasses.replace(dense, file_type="NVFP4").released_in == "NVFP4"


@pytest.mark.parametrize(
    "found",
    [
        released(rest="Q8_0"),  # what llama.cpp's MXFP4_MOE makes
        released(experts="Q4_K"),
        released(file_type="Q4_K_M"),
        inventory(tensor((256, 256), "MXFP4", ATTENTION[0])),  # of a model without experts
        inventory(tensor((256, 8), "NVFP4", "token_embd.weight"), file_type="NVFP4"),
    ],
)
def test_c7_other_quantized_files_are_no_originals(found: Inventory) -> None:
    assert (found.released_in, found.is_original) == ("", False)
    assert inspect(found).verdict.role == "candidate"


def test_c7_inspect_says_why_it_is_a_reference() -> None:
    verdict = inspect(released()).verdict
    assert verdict.role == "reference"
    assert "as it was released: its experts at MXFP4, the rest at 16 bit" in verdict.reason
    assert inspect(released()).disagreements == ()


def test_tables_of_integers_are_not_quantized() -> None:
    found = inventory(tensor((256, 256), "F16"), tensor((4, 8), "I32", "blk.0.ffn_gate_tid2eid.weight"))
    assert dict(found.quantized) == {}
    assert dict(inventory(tensor((256, 256), "Q2_K")).quantized) == {"blk.0.ffn_up.weight": "Q2_K"}
