"""Where levels are kept, and what happens when there is no room for them; no model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres import levels
from qres.errors import InputError
from qres.gguf import magnitudes, model_file
from qres.gguf.inventory import Inventory
from qres.native import worker
from qres.pipeline import sizes
from qres.quantize import cache, ladder
from tests import tiny


class Usage(NamedTuple):
    """As shutil.disk_usage."""

    total: int
    used: int
    free: int


def left(folder: Path) -> list[str]:
    """What a failure left, but for the lock."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.fixture
def reference(tmp_path: Path) -> Inventory:
    return model_file.read(tiny.write_llama(tmp_path / "a 100% odd näme.gguf", n_layer=1))


def test_default_folder_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QRES_CACHE", str(tmp_path))
    assert cache.default_folder() == tmp_path
    monkeypatch.delenv("QRES_CACHE")
    assert cache.default_folder().name == "qres"


def test_level_path_depends_on_content_level_and_quantizer(reference: Inventory, tmp_path: Path) -> None:
    def path(digest: str, level: str, version: str) -> Path:
        return cache.level_path(tmp_path, reference, digest, levels.parse(level), version)

    paths = {path("a" * 64, "Q4_K_M", "1"), path("b" * 64, "Q4_K_M", "1"), path("a" * 64, "Q6_K", "1")}
    paths.add(path("a" * 64, "Q4_K_M", "2"))
    assert len(paths) == 4
    assert all(p.is_relative_to(tmp_path) and p.suffix == ".gguf" and "%" not in p.name for p in paths)


def test_make_refuses_when_the_disk_is_full(
    reference: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "run", lambda *_: [{}])  # the dry run
    monkeypatch.setattr(ladder, "planned_bytes", lambda *_: 100 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40, 120 * 2**20))
    target = tmp_path / "cache" / "level.gguf"
    with pytest.raises(InputError, match=r"Q4_K_M needs 100 MiB in .*cache, 120 MiB are free"):
        cache.make(reference, levels.parse("Q4_K_M"), target, 1, lambda *_: None)
    assert not left(target.parent)


def test_make_refuses_a_file_that_is_not_what_was_asked_for(
    reference: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(work: Any, _on_event: Any, source: Path, *rest: Any) -> list[dict[str, str]] | None:  # noqa: ANN401 - stands for any work
        if work is ladder._planned:
            return [{}]
        shutil.copy(source, rest[0])  # the reference itself, not a Q4_K_M
        return None

    monkeypatch.setattr(worker, "run", run)
    target = tmp_path / "cache" / "level.gguf"
    with pytest.raises(Exception, match="wrote F16 where Q4_K_M was asked for"):
        cache.make(reference, levels.parse("Q4_K_M"), target, 1, lambda *_: None)
    assert not left(target.parent)


def test_types_16bit_follow_the_range(tmp_path: Path) -> None:
    def wide(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        if name == "blk.0.ffn_up.weight":
            values[3, 7] = 70_000.0
        if name == "blk.0.ffn_gate.weight":
            kind = gguf.GGMLQuantizationType.BF16
            return gguf.quantize(values, kind), kind
        return values, None  # F32

    inventory = model_file.read(tiny.write_llama(tmp_path / "wide.gguf", n_layer=1, change=wide))
    types = sizes.types_16bit(inventory, magnitudes.scan(inventory))
    assert types["blk.0.ffn_up.weight"] == "BF16"
    assert types["blk.0.ffn_gate.weight"] == "BF16"
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert "blk.0.ffn_norm.weight" not in types
