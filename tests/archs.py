"""The tiny random models of many llama.cpp architectures, where the workplace of the project has them.

They are made from headers that are not part of the repository: set QRES_SHARED to the folder that holds `archs/`, or
put it beside the checkout as `../shared`. Tests that need them skip elsewhere and say so.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qres.errors import NativeError
from qres.events import Listener, Logged
from qres.native import worker

SHARED = Path(os.environ.get("QRES_SHARED", Path(__file__).resolve().parents[2] / "shared"))

MOST_PROCESSES = 4
"""Each holds torch and a model: half a gigabyte."""


def need(path: str) -> Path:
    """A file of the shared folder, or a skipped test."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"needs {path} in the folder named by QRES_SHARED")
    return found


def names() -> list[str]:
    """Every architecture there is a header for, sorted."""
    return sorted(path.name.removesuffix(".header.gz") for path in (SHARED / "archs").glob("*.header.gz"))


def _maker() -> ModuleType:
    return _module("archs/make_archs.py")


def _module(path: str) -> ModuleType:
    """A script of the shared folder."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, need(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_worker(work: Callable[..., None], folder: Path) -> dict[str, Any]:
    """What a function finds of every architecture, in a few child processes that may crash.

    Args:
        work: Called with an `emit` of (name, what was found), the names left, and the folder; emits something of a name
            before it begins with it.
        folder: Where it makes its files.

    Returns:
        By name, what was emitted last; the error where the process died.
    """
    need("archs/make_archs.py")
    n = min(os.cpu_count() or 1, MOST_PROCESSES)
    with ThreadPoolExecutor(n) as pool:
        shares = pool.map(lambda i: _share(work, folder, names()[i::n]), range(n))
    return dict(sorted(pair for share in shares for pair in share.items()))


def _share(work: Callable[..., None], folder: Path, left: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kept = folder / f"{left[0]}.found" if left else folder
    while left:  # a crash ends the worker: go on behind the model that crashed
        kept.unlink(missing_ok=True)
        try:
            worker.run(_Share(work, left, folder, kept), Logged())
        except NativeError as error:
            found |= dict(_read(kept))
            found[list(found)[-1]] = error
        found |= {name: value for name, value in _read(kept) if name not in found}
        left = [name for name in left if name not in found]
    return found


@dataclass(frozen=True)
class _Share:
    """Work on some models in the worker process; what is found goes to a file, which outlives a crash."""

    function: Callable[..., None]
    left: list[str]
    folder: Path
    kept: Path

    def work(self, _listener: Listener) -> None:
        with self.kept.open("ab", buffering=0) as file:
            self.function(lambda pair: file.write(pickle.dumps(pair)), self.left, self.folder)


def _read(kept: Path) -> list[tuple[str, Any]]:
    """Pairs of a name and what was found, in order; the last one of a name counts."""
    found = {}
    with kept.open("rb") as file, suppress(EOFError):
        while True:
            name, value = pickle.load(file)
            found[name] = value
    return list(found.items())


def make(name: str, folder: Path) -> Path:
    """Write one of the models."""
    target = folder / f"{name}.gguf"
    _maker().write(need(f"archs/{name}.header.gz"), target)
    return target


def make_gemma4(folder: Path, scales: Sequence[float]) -> Path:
    """Gemma 4 whose five layers scale the stream behind them (`layer_output_scale`), with per-layer embeddings."""
    edit = _module("cases/edit.py")
    metadata, tensors = edit.load(make("gemma4-dense", folder))
    rng, changed = np.random.default_rng(3), []
    for name, shape, kind, data in tensors:
        values = np.frombuffer(data, "<f4") if kind == 0 else np.empty(0)
        if name.endswith("layer_output_scale.weight"):
            values = np.array([scales[int(name.split(".")[1])]])
        elif name.endswith((".scale", "input_scale")):
            values = np.ones_like(values)
        elif "norm" in name:
            values = 1 + values
        changed.append([name, shape, kind, values.astype("<f4").tobytes() if kind == 0 else data])
    width, per_layer = 128, 64
    rows = rng.normal(0, 0.1, (per_layer * len(scales), width)).astype("<f4")
    changed.append(["per_layer_model_proj.weight", [width, len(rows)], 0, rows.tobytes()])
    changed.append(["per_layer_proj_norm.weight", [per_layer], 0, np.ones(per_layer, "<f4").tobytes()])
    keys = {
        "gemma4.embedding_length_per_layer_input": edit.u32(per_layer),
        "gemma4.attention.shared_kv_layers": edit.u32(0),
    }
    edit.save(target := folder / "gemma4-scaled.gguf", {**metadata, **keys}, changed)
    return target
