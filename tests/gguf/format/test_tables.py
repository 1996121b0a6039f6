"""Rows that repeat, counts that are false, and lengths that are: no row is lost for them, and little work done."""

from __future__ import annotations

import struct
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qres.gguf import model_file
from tests.effort import lines_run
from tests.gguf.building import LLAMA, ROWS, VALID, Row, Typed, build, parsed, put, strings
from tests.gguf.format.seeds import FALSE_LENGTHS


def test_repeated_and_nameless_rows_are_read_past() -> None:
    pairs = [("a.key", 1), ("a.key", 2), ("", 3), ("b.key", 4)]
    found = parsed(build(pairs, [*ROWS, ROWS[0], ROWS[1]], 896))
    assert found.metadata == {"a.key": 1, "": 3, "b.key": 4}
    assert [t.name for t in found.tensors] == [row[0] for row in ROWS]
    assert [p.message for p in found.problems] == [
        "damaged: metadata key 'a.key' appears twice",
        "damaged: metadata value 3 of 4 has no key",
        "damaged: tensor 'token_embd.weight' appears twice",
        "damaged: tensor 'blk.0.attn_norm.weight' appears twice",
    ]


@pytest.mark.parametrize(
    ("counts", "claim"),
    [((2**62, 2**63), "claims"), ((3, 2**40), "claims"), ((2**40, 15), "claims"), ((5, 17), "17"), ((3, 12), "12")],
)
def test_false_counts_cost_no_row(counts: tuple[int, int], claim: str) -> None:
    whole, found = parsed(VALID), parsed(build(LLAMA, ROWS, 896, counts=counts))
    assert (found.metadata, found.tensors) == (whole.metadata, whole.tensors)
    assert claim in found.problems[0].message


def test_tables_of_nothing_but_problems_end_soon() -> None:
    for data in (build(counts=(0, 10**6)) + bytes(13 * 10**6), build(counts=(10**6, 0)) + bytes(24 * 10**6)):
        found = parsed(data)
        assert len(found.problems) < 110
        assert len(found.metadata) + len(found.tensors) < 110


@pytest.mark.parametrize("case", FALSE_LENGTHS)
@pytest.mark.parametrize("size", [1 << 12, 1 << 32])
def test_false_lengths_cost_neither_memory_nor_work(tmp_path: Path, case: str, size: int) -> None:
    path = put(tmp_path, FALSE_LENGTHS[case])
    with path.open("r+b") as file:
        file.truncate(size)  # sparse: at 4 GiB some of the lengths fit
    tracemalloc.start()
    try:
        found = model_file.read(path, tolerant=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.problems
    assert peak < 16 << 20
    assert lines_run(partial(model_file.read, path, tolerant=True)) < 1000  # measured: at most 384


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.booleans(),
            st.text(max_size=20),
            st.binary(min_size=8, max_size=8).map(lambda raw: Typed(10, raw)),
            st.integers(-128, 127).map(lambda i: Typed(1, struct.pack("<b", i))),
            st.integers(0, 2**16 - 1).map(lambda i: Typed(2, struct.pack("<H", i))),
            st.lists(st.text(max_size=8), max_size=6).map(strings),
        ),
        max_size=8,
    ).filter(lambda metadata: "general.alignment" not in metadata),
    st.lists(
        st.tuples(
            st.text(min_size=1, max_size=12),
            st.lists(st.integers(0, 40), max_size=4).map(tuple),
            st.sampled_from([0, 1, 30, 200]),
            st.just(0),
        ),
        max_size=6,
        unique_by=lambda row: row[0],
    ),
)
def test_every_valid_file_is_read_without_a_problem(metadata: dict[str, object], rows: list[Row]) -> None:
    found = parsed(build(metadata, rows, 4 * 40**4))
    assert all(problem.unloadable for problem in found.problems)  # all rows are said to lie in one place
    assert list(found.metadata) == list(metadata)
    assert [(t.name, t.shape, t.type_id) for t in found.tensors] == [row[:3] for row in rows]
