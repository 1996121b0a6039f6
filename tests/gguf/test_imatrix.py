"""Importance matrices, read in both formats, compared with a model, and written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from qres import levels
from qres.errors import InputError, QresError, UsageError
from qres.gguf import imatrix, inventory, model_file
from qres.gguf.format.tensor import Tensor
from qres.pipeline import candidates, checks
from qres.pipeline.options import ScanOptions
from qres.quantize import cache
from qres.quantize.original import original
from tests import tiny
from tests.gguf.building import put
from tests.gguf.imatrices import as_dat, as_gguf, dat_end
from tests.inputs.case import full
from tests.listening import Heard

UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down_exps.weight"


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape, "F16", 1, int(np.prod(shape)), 2 * int(np.prod(shape)), 0)


# ---------------------------------------------------------------- reading


def test_gguf_is_sums_over_counts_expert_by_expert(tmp_path: Path) -> None:
    data = as_gguf({UP: ([8, 0, 2, 4], [4]), DOWN: ([3, 6, 5, 7, 10, 20], [3, 0, 10])})
    found = imatrix.read(put(tmp_path, data, "i.gguf"))
    assert list(found.entries) == [DOWN, UP]
    assert found.entries[UP].tolist() == [[2, 0, 0.5, 1]]
    assert found.entries[DOWN].tolist() == [[1, 2], [1, 1], [1, 2]]  # nothing was counted for the second: 1
    assert found.sums[DOWN].tolist() == [[3, 6], [5, 7], [10, 20]]
    assert found.counts[DOWN].tolist() == [3, 0, 10]
    assert (found.datasets, found.chunks, found.chunk_size) == (("wiki.txt", "code.txt"), 7, 512)
    assert all(entry.dtype == np.float32 for entry in found.entries.values())


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    found = imatrix.read(put(tmp_path, as_gguf({UP: ([6, 6, 6], [2.6, 0.4, 3])})))
    assert found.entries[UP].tolist() == [[2], [1], [2]]


def test_gguf_without_the_keys(tmp_path: Path) -> None:
    found = imatrix.read(put(tmp_path, as_gguf({UP: ([1, 2], [1])}, {})))
    assert (found.datasets, found.chunks, found.chunk_size) == ((), 0, 0)


@pytest.mark.parametrize("end", [b"", dat_end(9, "wiki.txt")])
@pytest.mark.parametrize("name", ["i.dat", "i.imatrix", "i.gguf"])
def test_dat_is_values_over_calls(tmp_path: Path, end: bytes, name: str) -> None:
    found = imatrix.read(put(tmp_path, as_dat({UP: [8, 4], DOWN: [1, 2, 3, 4]}, calls=4, end=end), name))
    assert found.entries[UP].tolist() == [[2, 1]]
    assert found.importance(tensor(DOWN, 2, 5, 2)) is not None
    assert (found.datasets, found.chunks) == ((("wiki.txt",), 9) if end else ((), 0))


def test_dat_without_calls_holds_means(tmp_path: Path) -> None:
    assert imatrix.read(put(tmp_path, as_dat({UP: [8, 4]}, calls=0))).entries[UP].tolist() == [[8, 4]]


def test_digest_is_of_the_entries_alone(tmp_path: Path) -> None:
    one = imatrix.read(put(tmp_path, as_gguf({UP: ([8, 4], [4]), DOWN: ([1, 2], [1])}), "1"))
    other = imatrix.read(put(tmp_path, as_dat({DOWN: [2, 4], UP: [4, 2]}, calls=2), "2"))
    changed = imatrix.read(put(tmp_path, as_gguf({UP: ([8, 4.5], [4]), DOWN: ([1, 2], [1])}), "3"))
    assert one.digest == other.digest != changed.digest


# ---------------------------------------------------------------- of this model?


@pytest.fixture
def reference(tmp_path: Path) -> inventory.Inventory:
    return model_file.read(tiny.write_llama(tmp_path / "tiny.gguf", n_layer=1))


def whole(reference: inventory.Inventory, tmp_path: Path, **other: int) -> imatrix.Imatrix:
    """An entry for each matrix of a block; another number of columns for one of them."""
    names = [t for t in reference.tensors if t.n_dims > 1 and t.name.startswith("blk.")]
    random = np.random.default_rng(0)
    sums = {t.name: random.gamma(1, 4, (1, other.get(t.name.split(".")[2], t.row))) for t in names}
    path = tmp_path / "own.gguf"
    counts = {name: np.array([4]) for name in sums}
    imatrix.write(path, sums, counts, dataset="a text", chunks=1, chunk_size=4)
    return imatrix.read(path)


def test_entries_of_this_model_are_taken(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path)
    assert found.check(reference) == ()
    up = next(t for t in reference.tensors if t.name == UP)
    importance = found.importance(up)
    assert importance is not None
    assert importance.shape == (1, 256)
    assert found.importance(reference.tensors[0]) is None


def test_matrices_without_an_entry_are_listed(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path)
    fewer = replace(found, entries={name: entry for name, entry in found.entries.items() if name != UP})
    assert fewer.check(reference) == (UP,)


def test_entry_of_another_size_is_refused(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path, ffn_down=1024)
    with pytest.raises(
        InputError,
        match=r"own.gguf was computed from another model: its entry for "
        r"blk.0.ffn_down.weight has 1024 values, tiny.gguf has rows of 512",
    ) as caught:
        found.check(reference)
    assert "--make-imatrix" in caught.value.hint


def test_entry_for_no_tensor_is_refused(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path)
    more = replace(found, entries={**found.entries, "blk.9.ffn_up.weight": found.entries[UP]})
    with pytest.raises(InputError, match=r"an entry for blk.9.ffn_up.weight, which tiny.gguf does not have"):
        more.check(reference)


def test_embedding_may_have_an_entry_that_does_not_fit(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path)
    more = replace(found, entries={**found.entries, "token_embd.weight": np.ones((1, 3), np.float32)})
    assert more.check(reference) == ()
    assert more.importance(reference.tensors[0]) is None
    own = more.for_model(reference)
    assert own.keys() == found.entries.keys()
    assert all(np.array_equal(own[name], entry) for name, entry in found.entries.items())


def test_experts_have_a_row_each(tmp_path: Path) -> None:
    found = imatrix.read(put(tmp_path, as_gguf({UP: ([1, 2, 3, 4, 5, 6], [1]), DOWN: ([1, 2, 3, 4], [1, 1])})))
    one = found.importance(tensor(UP, 2, 9, 3))  # three matrices that share a count
    assert one is not None
    assert one.tolist() == [[1, 2], [3, 4], [5, 6]]
    both = found.importance(tensor(DOWN, 2, 9, 2))
    assert both is not None
    assert both.tolist() == [[1, 2], [3, 4]]
    assert found.importance(tensor(DOWN, 2, 9, 3)) is None


# ---------------------------------------------------------------- writing


def test_written_is_what_is_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sums = {UP: random.gamma(1, 3, (1, 64)), DOWN: random.gamma(1, 3, (3, 32))}
    counts = {UP: np.array([1024]), DOWN: np.array([10, 0, 3])}
    path = tmp_path / "new" / "i.gguf"
    imatrix.write(path, sums, counts, dataset="built-in text ü", chunks=2, chunk_size=512)
    found = imatrix.read(path)
    for name, squares in sums.items():
        assert np.array_equal(found.sums[name], squares.astype(np.float32))
        assert found.counts[name].tolist() == counts[name].tolist()
    assert (found.datasets, found.chunks, found.chunk_size) == (("built-in text ü",), 2, 512)
    reader = gguf.GGUFReader(path)
    assert "general.architecture" not in reader.fields  # as llama-imatrix writes it
    assert [t.name for t in reader.tensors] == [f"{n}{s}" for n in (DOWN, UP) for s in (".in_sum2", ".counts")]
    assert [list(t.shape) for t in reader.tensors] == [[32, 3], [1, 3], [64, 1], [1, 1]]
    assert model_file.read(path).kind == "imatrix"
    assert [p.name for p in path.parent.iterdir()] == ["i.gguf"]


def test_matrices_that_share_a_count_are_one_row(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    imatrix.write(path, {UP: np.full((3, 2), 8.0)}, {UP: np.array([4])}, dataset="", chunks=1, chunk_size=4)
    assert imatrix.read(path).entries[UP].tolist() == [[2] * 6]


def test_write_refuses_what_cannot_be(tmp_path: Path) -> None:
    path, one = tmp_path / "i.gguf", np.ones((1, 2))
    with pytest.raises(ValueError, match="different tensors"):
        imatrix.write(path, {UP: one}, {DOWN: np.ones(1)}, dataset="", chunks=1, chunk_size=1)
    with pytest.raises(ValueError, match=r"shape \(1, 2\) with counts of shape \(3,\)"):
        imatrix.write(path, {UP: one}, {UP: np.ones(3)}, dataset="", chunks=1, chunk_size=1)
    with pytest.raises(InputError, match=r"inputs of blk.0.ffn_up.weight are not finite"):
        imatrix.write(path, {UP: one * np.inf}, {UP: np.ones(1)}, dataset="", chunks=1, chunk_size=1)
    put(tmp_path, b"", "file")
    with pytest.raises(InputError, match=r"cannot write .*Not a directory|File exists"):
        imatrix.write(tmp_path / "file" / "i.gguf", {UP: one}, {UP: np.ones(1)}, dataset="", chunks=1, chunk_size=1)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_only_an_importance_matrix_is_replaced(tmp_path: Path) -> None:
    old = put(tmp_path, as_gguf({UP: ([1, 2], [1])}), "old.gguf")
    imatrix.require_writable(old, ())
    imatrix.require_writable(tmp_path / "a" / "b" / "new.gguf", (old,))
    (tmp_path / "link.gguf").symlink_to(old)
    with pytest.raises(InputError, match="is an input and would be overwritten"):
        imatrix.require_writable(tmp_path / "link.gguf", (old,))
    for data in (full(), b"", b"words", as_dat({UP: [1, 2]})):
        with pytest.raises(InputError, match="exists and is not an importance matrix"):
            imatrix.require_writable(put(tmp_path, data, "other.gguf"), ())
    with pytest.raises(UsageError, match="the file is a GGUF"):
        imatrix.require_writable(tmp_path / "i.dat", ())
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------- levels made with it


def test_level_made_with_one_is_another_file(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path)
    changed = replace(found, entries={name: entry * 2 for name, entry in found.entries.items()})
    level = levels.parse("Q4_K_M")
    models = [replace(original(reference, one, 1), digest="d") for one in (None, found, changed)]
    plain, *others = (cache.level_path(tmp_path, model, level, "1") for model in models)
    assert len({plain, *others}) == 3
    assert "imatrix" not in plain.name


def test_levels_that_need_one_become_possible() -> None:
    names = [level.name for level in levels.LEVELS if level.needs_imatrix]
    assert [level.name for level in candidates.levels_to_make(names, with_imatrix=True)] == names
    with pytest.raises(UsageError, match="IQ1_S needs an importance matrix") as caught:
        candidates.levels_to_make(names)
    assert "--imatrix" in caught.value.hint


def test_scan_says_what_has_no_entry(reference: inventory.Inventory, tmp_path: Path) -> None:
    found = whole(reference, tmp_path)
    kept = [name for name in found.sums if "attn" in name]
    path = tmp_path / "part.gguf"
    imatrix.write(
        path,
        {name: found.sums[name] for name in kept},
        {name: found.counts[name] for name in kept},
        dataset="",
        chunks=1,
        chunk_size=4,
    )
    listener = Heard()
    options = ScanOptions(reference.path, imatrix=path)
    read = checks.given_imatrix(options, (reference,), listener)
    assert read is not None
    assert sorted(read.entries) == sorted(kept)
    assert listener.texts("note") == ["part.gguf has no entry for blk.0.ffn_gate.weight and 2 more: quantized without"]
    assert checks.given_imatrix(ScanOptions(reference.path), (reference,), listener) is None


def said(path: Path) -> QresError | None:
    """What a reading ended with."""
    try:
        imatrix.read(path)
    except QresError as error:
        return error
    return None


@pytest.mark.parametrize(
    "good",
    [as_gguf({UP: ([1, 2], [1])}), as_dat({UP: [1, 2], DOWN: [3]}, end=dat_end(1, "a"))],
    ids=["gguf", "dat"],
)
def test_damage_anywhere_is_one_line_or_an_imatrix(tmp_path: Path, good: bytes) -> None:
    """Every length field, cut and changed: never a traceback, nor memory for what a false number claims."""
    for at in range(0, len(good), 3):
        for data in (good[:at], good[:at] + b"\xff" + good[at + 1 :], good[:at] + b"\x7f" + good[at + 1 :]):
            error = said(put(tmp_path, data, "i"))
            assert error is None or (error.hint and "\n" not in str(error)), (at, error)


def test_size_is_limited_before_anything_is_read(tmp_path: Path) -> None:
    for data in (as_gguf({UP: ([1, 2], [1])}), as_dat({UP: [1, 2]})):
        path = put(tmp_path, data)
        os.truncate(path, 2**40)
        with pytest.raises(InputError, match=r"has 1,024.0 GiB, too many for an importance matrix"):
            imatrix.read(path)
