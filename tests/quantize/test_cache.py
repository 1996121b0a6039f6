"""Where levels are kept, and what happens when there is no room for them; no model is loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres import levels
from qres.errors import InputError, NativeError
from qres.events import Listener, Logged
from qres.gguf import magnitudes, model_file
from qres.gguf.inventory import Inventory
from qres.native import worker
from qres.pipeline import sizes
from qres.quantize import cache, ladder, make
from qres.quantize.original import original, with_digest
from tests import tiny


class Usage(NamedTuple):
    """As shutil.disk_usage."""

    total: int
    used: int
    free: int


def left(folder: Path) -> list[str]:
    """What a failure left, but for the lock."""
    return [path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def level_file(reference: Inventory, folder: Path) -> Inventory:
    return cache.level_file(
        with_digest(original(reference, None, 1), Logged()), levels.parse("Q4_K_M"), folder, Logged()
    )


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
        model = replace(original(reference, None, 1), digest=digest)
        return cache.level_path(tmp_path, model, levels.parse(level), version)

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
    with pytest.raises(InputError, match=r"Q4_K_M needs 100 MiB in .*cache/levels/\w+-[\d.]+, 120 MiB are free"):
        level_file(reference, tmp_path / "cache")
    assert not left(tmp_path / "cache")


def test_make_refuses_a_file_that_is_not_what_was_asked_for(
    reference: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(task: ladder._PlanTask | make._QuantizeTask, _listener: Listener) -> list[dict[str, str]] | None:
        if isinstance(task, ladder._PlanTask):
            return [{}]
        shutil.copy(task.source, task.target)  # the reference itself, not a Q4_K_M
        return None

    monkeypatch.setattr(worker, "run", run)
    with pytest.raises(NativeError, match="wrote F16 where Q4_K_M was asked for"):
        level_file(reference, tmp_path / "cache")
    assert not left(tmp_path / "cache")


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
