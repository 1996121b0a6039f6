"""Tensor rows that are impossible, or lie beyond the end of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from qres.errors import UnsupportedError
from qres.gguf import model_file
from tests.gguf.building import LLAMA, ROWS, VALID, Row, build, inventory, parsed, put

# ---------------------------------------------------------------- valid files


def test_unknown_types_are_rows(tmp_path: Path) -> None:
    rows = [*ROWS, ("blk.0.new.weight", (64, 2), 153, 864), ("blk.0.old.weight", (64, 2), 31, 896)]
    found = inventory(tmp_path, rows=rows)
    assert [(t.type, t.n_bytes) for t in found.tensors[-2:]] == [("type 153", None), ("Q4_0_4_4", 72)]
    assert found.bpw == pytest.approx(8 * (856 + 72) / (448 + 128))  # the unknown tensor left out of both
    with pytest.raises(UnsupportedError, match=r"type 153.*update"):
        model_file.require_language_model(found, "reference")


# ---------------------------------------------------------------- tolerant reading


def test_impossible_tensors_are_rows_without_a_size() -> None:
    rows: list[Row] = [
        ("huge.weight", (2**40, 2**40), 0, 0),
        ("bytes.weight", (2**61, 2), 28, 0),  # 2**62 weights, but 2**65 bytes
        ("five.weight", (1,) * 5, 0, 0),
        ("torn.weight", (100, 4), 12, 0),
        ("torn2.weight", (100, 4), 12, 0),
        ("last.weight", (4,), 0, 0),
    ]
    found = parsed(build(LLAMA, rows, 64))
    assert [(t.name, t.n_weights, t.n_bytes) for t in found.tensors] == [
        ("huge.weight", 0, None),
        ("bytes.weight", 0, None),
        ("torn.weight", 400, None),
        ("torn2.weight", 400, None),
        ("last.weight", 4, 16),
    ]
    assert [p.message for p in found.problems] == [
        "damaged: tensor 'huge.weight' has the impossible shape [1099511627776, 1099511627776]",
        "damaged: tensor 'bytes.weight' has the impossible shape [2305843009213693952, 2]",
        "damaged: tensor 'five.weight' has 5 dimensions, at most 4 are possible",
        "damaged or truncated: it claims 15 metadata values and 6 tensors, 15 and 5 were found",
        "damaged: tensor 'torn.weight' has rows of 100, not a multiple of Q4_K's block of 256; 1 more such tensors",
    ]


def test_truncated_download_lists_every_row(tmp_path: Path) -> None:
    found = model_file.read(put(tmp_path, VALID[: len(VALID) - 896 + 600]), tolerant=True)
    assert found.tensors == parsed(VALID).tensors
    assert found.n_weights == 448
    (problem,) = found.problems
    size, end = found.file_bytes, found.tensors[1].end
    assert problem.message == (
        f"truncated: tensor 'blk.0.attn_norm.weight' ends at byte {end}, the file has {size}; "
        f"1 more tensors beyond it, the last up to byte {found.tensors[2].end}"
    )
