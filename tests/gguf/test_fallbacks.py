"""Which tensors of a level fell back to a larger type, as the file alone tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qres import levels
from qres.gguf import fallbacks
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from tests.gguf.building import LLAMA, inventory
from tests.gguf.choice_of_types import LENGTHS, tensor
from tests.search import searched


def test_fallbacks_of_a_k_level(tmp_path: Path) -> None:
    rows = [
        ("token_embd.weight", (64, 4), 8, 0),  # Q8_0 <- Q6_K
        ("blk.0.attn_q.weight", (64, 4), 6, 512),  # Q5_0 <- Q4_K
        ("blk.0.attn_v.weight", (64, 4), 7, 1024),  # Q5_1 <- Q5_K
        ("blk.0.fits.weight", (256, 4), 8, 2048),  # chosen, not a fallback
        ("blk.0.odd.weight", (80, 4), 1, 4096),  # F16: not even blocks of 32
        ("blk.0.ssm_conv1d.weight", (4, 64), 1, 8192),  # never quantized
        ("blk.0.attn_norm.weight", (64,), 0, 9000),
    ]
    found = fallbacks.fallbacks(inventory(tmp_path, rows=rows))
    assert [(f.tensor.split(".")[-2], f.wanted, f.type) for f in found] == [
        ("token_embd", "Q6_K", "Q8_0"),
        ("attn_q", "Q4_K", "Q5_0"),
        ("attn_v", "Q5_K", "Q5_1"),
        ("odd", "Q4_K", "F16"),
    ]
    assert found[1].reason == "row of 64 is not a multiple of 256"


@pytest.mark.parametrize(
    ("ftype", "type_id", "wanted"),
    [
        (12, 2, "Q3_K"),  # Q3_K_M holding Q4_0
        (10, 2, "Q2_K or Q3_K"),
        (26, 20, "IQ3_S"),  # IQ3_S holding IQ4_NL
        (28, 2, "Q2_K"),  # IQ2_S holding Q4_0
        (2, 2, None),  # Q4_0 holding Q4_0
        (8, 7, None),  # Q5_0 holding Q5_1: chosen with an importance matrix
        (2, 8, "Q6_K"),  # Q4_0 holding a Q8_0 head
        (7, 8, None),
        (1, 6, None),
        (38, 8, None),
        (999, 6, None),
    ],
)
def test_fallback_by_level(tmp_path: Path, ftype: int, type_id: int, wanted: str | None) -> None:
    found = inventory(tmp_path, LLAMA | {"general.file_type": ftype}, [("token_embd.weight", (64, 4), type_id, 0)])
    assert [f.wanted for f in fallbacks.fallbacks(found)] == ([wanted] if wanted else [])


# ---------------------------------------------------------------- the choice of types


def of_level(level: str, tensors: tuple[Tensor, ...]) -> Inventory:
    path = Path("model.gguf")
    return Inventory(path, (path,), 3, "model", "llama", "", level, 1, 64, 512, 100, tensors, 0, {})


@searched
@given(st.sampled_from(levels.LEVELS), st.lists(LENGTHS.filter(lambda row: row > 32), min_size=1, max_size=4))
def test_fallbacks_read_back_what_the_choice_of_types_did(level: levels.LevelSpec, rows: list[int]) -> None:
    assume(levels.TYPE_TRAITS[level.base].block_size == 256)
    made = [levels.fitting_type(level.base, row) for row in rows]
    tensors = tuple(tensor((row, 2), type, f"{i}.weight") for i, (row, type) in enumerate(zip(rows, made, strict=True)))
    found = {item.tensor: item for item in fallbacks.fallbacks(of_level(level.name, tensors))}
    assert list(found) == [t.name for t in tensors if t.type != level.base]
    for item in found.values():
        assert item.type == made[int(item.tensor.removesuffix(".weight"))]
        assert level.base in item.wanted.split(" or ")
