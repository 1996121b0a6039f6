"""Levels that llama.cpp makes with an importance matrix: the same blocks as from its rows, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from qres import levels
from qres.errors import NativeError
from qres.events import Logged
from qres.gguf import imatrix, inventory, model_file
from qres.native.blocks import quantize
from qres.quantize import cache
from qres.quantize.original import original
from tests import tiny

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> inventory.Inventory:
    return model_file.read(tiny.write_llama(tmp_path_factory.mktemp("imatrix") / "tiny.gguf"))


@pytest.fixture(scope="module")
def importance(reference: inventory.Inventory) -> imatrix.Imatrix:
    """Columns that differ by orders of magnitude, as they do in real models."""
    random = np.random.default_rng(1)
    matrices = [t for t in reference.tensors if t.n_dims > 1 and t.name.startswith("blk.")]
    sums = {t.name: np.exp(random.normal(0, 2, (1, t.row))) for t in matrices}
    path = reference.path.with_name("i.gguf")
    counts = {name: np.array([64]) for name in sums}
    imatrix.write(path, sums, counts, dataset="ä" * 90, chunks=3, chunk_size=64)
    return imatrix.read(path)


def made(reference: inventory.Inventory, name: str, folder: Path, given: imatrix.Imatrix | None) -> Path:
    level = levels.parse(name)
    model = replace(original(reference, given, 2), digest="digest")
    return cache.level_file(model, level, folder, Logged()).path


def matrices(path: Path) -> Iterator[gguf.ReaderTensor]:
    return (t for t in gguf.GGUFReader(path).tensors if t.tensor_type != gguf.GGMLQuantizationType.F32)


@pytest.mark.parametrize("name", ["Q4_K_M", "IQ2_XXS", "Q2_K_S", "Q4_0"])
def test_level_is_what_rows_become(
    reference: inventory.Inventory, importance: imatrix.Imatrix, tmp_path: Path, name: str
) -> None:
    path = made(reference, name, tmp_path, importance)
    tensors = {tensor.name: tensor for tensor in reference.tensors}
    weights = {t.name: t.data for t in gguf.GGUFReader(reference.path).tensors}
    without = 0
    for tensor in matrices(path):
        own = importance.importance(tensors[tensor.name])
        without += own is None
        row = None if own is None else own[0]
        blocks = quantize(weights[tensor.name], tensor.tensor_type.name, 1, row)
        assert np.array_equal(blocks, tensor.data.view(np.uint8).reshape(blocks.shape)), tensor.name
    assert without == 2  # the embedding and the head


def test_importance_changes_the_level_and_is_noted_in_it(
    reference: inventory.Inventory, importance: imatrix.Imatrix, tmp_path: Path
) -> None:
    plain, weighted = made(reference, "Q4_0", tmp_path, None), made(reference, "Q4_0", tmp_path, importance)
    assert plain != weighted
    different = [
        a.name for a, b in zip(matrices(plain), matrices(weighted), strict=True) if not np.array_equal(a.data, b.data)
    ]
    assert sorted(different) == sorted(importance.entries)
    fields = gguf.GGUFReader(weighted).fields
    noted = {key: fields[key].contents() for key in fields if key.startswith("quantize.imatrix.")}
    assert noted == {
        "quantize.imatrix.file": "i.gguf",
        "quantize.imatrix.dataset": "ä" * 63,  # llama.cpp takes 127 bytes
        "quantize.imatrix.entries_count": len(importance.entries),
        "quantize.imatrix.chunks_count": 3,
    }


def test_level_that_needs_more_entries_says_which(
    reference: inventory.Inventory, importance: imatrix.Imatrix, tmp_path: Path
) -> None:
    some = {name: entry for name, entry in importance.entries.items() if "ffn_up" not in name}
    fewer = imatrix.Imatrix(importance.path, some, {}, {}, (), 0, 0)
    with pytest.raises(NativeError, match=r"cannot quantize tiny.gguf: .*blk.0.ffn_up.weight"):
        made(reference, "IQ2_XXS", tmp_path, fewer)
