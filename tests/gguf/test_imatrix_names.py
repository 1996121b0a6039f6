"""Entries of an importance matrix for the same weights in other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qres.errors import InputError
from qres.gguf.imatrix import Imatrix
from qres.gguf.imatrix_names import fitted
from tests.gguf.building import ROWS, Row, inventory

WIDTH = 64


def matrix(*names: str, experts: int = 1) -> Imatrix:
    """One with an entry of its own for each of these tensors of block 0."""
    entries = {
        name if name == "output.weight" else f"blk.0.{name}.weight": np.full((experts, WIDTH), 1.0 + i, np.float32)
        for i, name in enumerate(names)
    }
    counts = {name: np.ones(experts, np.float32) for name in entries}
    return Imatrix(Path("im.gguf"), entries, dict(entries), counts, ("text",), 1, 512)


def model(tmp_path: Path, *tensors: tuple[str, tuple[int, ...]]) -> Sequence[Row]:
    return [*ROWS, *((f"blk.0.{name}.weight", shape, 1, 0) for name, shape in tensors)]


FUSED_QKV, APART_QKV = (
    ("attn_qkv", (WIDTH, 128)),
    [("attn_q", (WIDTH, 64)), ("attn_k", (WIDTH, 32)), ("attn_v", (WIDTH, 32))],
)
FUSED_EXPERTS = ("ffn_gate_up_exps", (WIDTH, 64, 2))
APART_EXPERTS = [("ffn_gate_exps", (WIDTH, 32, 2)), ("ffn_up_exps", (WIDTH, 32, 2))]


def test_one_entry_serves_all_parts(tmp_path: Path) -> None:
    reference = inventory(tmp_path, rows=model(tmp_path, *APART_QKV, *APART_EXPERTS))
    found = fitted(matrix("attn_qkv", "ffn_up"), reference)
    found.check(reference)  # nothing in it is of another model
    for name, _ in APART_QKV:
        assert (found.entries[f"blk.0.{name}.weight"] == 1.0).all()
    assert "blk.0.attn_qkv.weight" not in found.entries
    assert found.entries["blk.0.ffn_up.weight"].shape == (1, WIDTH)
    experts = fitted(matrix("ffn_gate_up_exps", experts=2), reference)
    experts.check(reference)
    for name, _ in APART_EXPERTS:
        assert experts.sums[f"blk.0.{name}.weight"].shape == (2, WIDTH)


def test_the_parts_have_one_input(tmp_path: Path) -> None:
    reference = inventory(tmp_path, rows=model(tmp_path, FUSED_QKV, FUSED_EXPERTS))
    found = fitted(matrix("attn_q", "attn_k", "attn_v", "ffn_gate_exps", "ffn_up_exps", experts=2), reference)
    assert (found.entries["blk.0.attn_qkv.weight"] == 1.0).all()
    assert (found.counts["blk.0.ffn_gate_up_exps.weight"] == 1.0).all()
    assert not any(
        "attn_q.weight" in name or "_up_exps.weight" in name.replace("gate_up", "") for name in found.entries
    )


def test_mla_in_the_other_form_has_no_entry(tmp_path: Path) -> None:
    reference = inventory(tmp_path, rows=model(tmp_path, ("attn_k_b", (32, 64, 2)), ("attn_v_b", (WIDTH, 64, 2))))
    found = fitted(matrix("attn_kv_b", "ffn_up"), reference)
    assert list(found.entries) == ["blk.0.ffn_up.weight"]
    assert "blk.0.attn_k_b.weight" in found.check(reference)


def test_a_head_that_is_tied_has_no_entry(tmp_path: Path) -> None:
    found = fitted(matrix("output.weight", "ffn_up"), inventory(tmp_path))
    assert list(found.entries) == ["blk.0.ffn_up.weight"]


def test_of_the_same_layout_nothing_changes(tmp_path: Path) -> None:
    reference = inventory(tmp_path, rows=model(tmp_path, *APART_QKV))
    given = matrix("attn_q", "attn_k", "attn_v", "ffn_up")
    assert fitted(given, reference) is given


def test_of_another_model_it_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has an entry for blk\.0\.ffn_other\.weight"):
        fitted(matrix("ffn_other"), inventory(tmp_path)).check(inventory(tmp_path))
