"""Two files that compute the same: what the graphs say against what the logits say, key by key."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from qres.errors import QresError
from qres.events import Listener
from qres.gguf import hyperparameters, model_file
from qres.native import worker
from tests import archs
from tests.gguf.editing import f32, load, save, u32
from tests.listening import Heard

pytestmark = pytest.mark.model

ARCHITECTURES = (
    *("llama-dense", "gemma2-dense", "gemma3-dense", "qwen3moe-moe", "deepseek2-moe", "phi3-dense", "granite-dense"),
    *("cohere2-dense", "gpt-oss-moe", "falcon-h1-dense", "llama4-moe", "mamba2-dense"),
)
N = 64
"""Tokens of the chunk, more than the fixtures' sliding windows."""


@dataclass(frozen=True)
class Compare:
    """A file with one key changed, key after key, against the file as it is."""

    model: Path
    keys: tuple[str, ...]

    def work(self, listener: Listener) -> None:
        """For each key that llama.cpp takes, a note: are the logits the same, and what difference is found."""
        from qres.measure.same_function import ROPE_FACTORS, difference
        from qres.native.session import Session, SessionOptions

        inventory = model_file.read(self.model)
        ids = tuple((7 * i * i + 3 * i + 1) % min(inventory.n_vocab or 128, 128) for i in range(N))
        names = frozenset(tensor.name for tensor in inventory.tensors)
        plain = frozenset(name for name in names if not name.startswith(ROPE_FACTORS))
        with Session(self.model, SessionOptions(N, 1)) as one:
            logits, graph = one.decode(ids).copy(), one.record(ids, plain)
        for key in self.keys:
            listener.note(json.dumps([key]))  # begun: what follows may take the process down
            other = self.model.with_name(f"{key}.gguf")
            try:
                with Session(other, SessionOptions(N, 1)) as two:
                    same = bool(np.array_equal(logits, two.decode(ids)))
                    found = difference(graph, two.record(ids, plain), names, other_layout=False)
            except QresError:
                continue
            listener.note(json.dumps([key, same, found]))


def compared(model: Path, keys: tuple[str, ...]) -> dict[str, tuple[bool, str]]:
    """By key that llama.cpp takes the other value of, what was noted."""
    heard = Heard()
    while keys:
        with suppress(QresError):
            worker.run(Compare(model, keys), heard)
            break
        begun = [json.loads(note)[0] for note in heard.texts("note")]
        if not begun:  # the file itself is not taken
            break
        keys = keys[keys.index(begun[-1]) + 1 :]
    rows = [json.loads(note) for note in heard.texts("note")]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}


def changed(path: Path, target: Path, key: str) -> bool:
    """Copy a file with another value of a key; False for a value that cannot be changed in its place."""
    shutil.copyfile(path, target)
    field = gguf.GGUFReader(target, "r+").fields[key]
    if field.types[0] in (gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY):
        return False
    value = field.parts[field.data[0]]
    if field.types[0] == gguf.GGUFValueType.BOOL:
        value[0] = not value[0]
    elif field.types[0] == gguf.GGUFValueType.FLOAT32:
        value[0] = value[0] * 1.5 + 0.25
    else:
        value[0] = value[0] // 2 if value[0] > 1 else value[0] + 1
    return True


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graphs_part_where_logits_do(name: str, tmp_path: Path) -> None:
    model = archs.make(name, tmp_path)
    inventory = model_file.read(model)
    keys = [key for key in inventory.metadata if key.startswith(f"{inventory.architecture}.")]
    found = compared(model, tuple(key for key in keys if changed(model, tmp_path / f"{key}.gguf", key)))
    said = {}
    for key in found:
        other = model_file.read(tmp_path / f"{key}.gguf")
        said[key] = [one.key for one in hyperparameters.differences(inventory, other)]
    assert len(found) >= 3
    parted = {key: difference for key, (same, difference) in found.items() if not same}
    assert {key: difference for key, difference in parted.items() if not difference} == {}
    assert {key for key in parted if key not in said[key]} == set()
    false = {key: difference for key, (same, difference) in found.items() if same and difference}
    assert false.keys() <= set(NO_EFFECT.get(name, ())), false


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_defaults_are_llama_cpps(name: str, tmp_path: Path) -> None:
    """A key that is not set computes as one that is set to the default that is told (facts.md, 37)."""
    metadata, tensors = load(archs.make(name, tmp_path))
    inventory = model_file.read(tmp_path / f"{name}.gguf")
    keys = {"rope.freq_base": f32(10000.0), "attention.head_count_kv": u32(0), "rope.dimension_count": u32(0)}
    keys |= {"attention.key_length": u32(0), "attention.value_length": u32(0)}
    for key, value in keys.items():
        full = f"{inventory.architecture}.{key}"
        without = {k: v for k, v in metadata.items() if k != full}
        bare = model_file.read(save(tmp_path / "without.gguf", without, tensors))
        default = hyperparameters.default(key, bare)
        if not isinstance(default, int | float):
            continue
        set_to = f32(float(default)) if value[0] == f32(0)[0] else u32(int(default))
        save(tmp_path / f"{full}.gguf", {**without, full: set_to}, tensors)
        (tmp_path / "without.gguf").replace(tmp_path / "model.gguf")
        for found in compared(tmp_path / "model.gguf", (full,)).values():
            assert found == (True, ""), key


NO_EFFECT: dict[str, tuple[str, ...]] = {}
"""Keys that the graph has, and that change no logit of these small models."""
