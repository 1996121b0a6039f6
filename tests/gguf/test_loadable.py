"""What is said to be loadable is what llama.cpp loads and computes, over hundreds of damaged headers."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from qres.errors import NativeError, QresError
from qres.events import Listener, Logged
from qres.gguf import model_file
from qres.native import worker
from tests import archs
from tests.gguf.damage import damaged

_COMPUTED = "llama.cpp takes the file, and aborts when it computes the first norm"
KNOWN: dict[str, str] = {"epsilon -1.0": _COMPUTED, "epsilon nan": _COMPUTED}
"""Damage on which the two disagree -> the reason."""


@dataclass(frozen=True)
class _Both:
    """Our word and llama.cpp's on some files; it goes to a file, which outlives a crash."""

    paths: tuple[Path, ...]
    kept: Path

    def work(self, _listener: Listener) -> None:
        with self.kept.open("a", buffering=1) as file:
            for path in self.paths:
                for who, ask in (("ours", _ours), ("theirs", _theirs)):
                    print(json.dumps([path.stem, who, "died"]), file=file)
                    print(json.dumps([path.stem, who, ask(path)]), file=file)


def _ours(path: Path) -> str:
    """Empty for loadable; as a command asks: the header, then a layout."""
    from qres.native.memory import layout

    try:
        model_file.require_language_model(model_file.read(path), "reference")
        with layout(path):
            return ""
    except QresError as error:
        return f"{error.exit_code}: {error.message}"


def _theirs(path: Path) -> str:
    """Empty for loaded and decoded."""
    from qres.native.session import Session, SessionOptions

    try:
        with Session(path, SessionOptions(n_ctx=64, n_threads=1)) as model:
            model.run(range(1, 33), None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def both(paths: list[Path], kept: Path) -> dict[str, dict[str, str]]:
    """Name -> who -> what was said; a crash ends one process, and the next goes on behind it."""
    found: dict[str, dict[str, str]] = {}
    while left := tuple(path for path in paths if path.stem not in found):
        with suppress(NativeError):
            worker.run(_Both(left, kept), Logged())
        for line in kept.read_text().splitlines():
            name, who, said = json.loads(line)
            found.setdefault(name, {})[who] = said
    for said in found.values():
        said.setdefault("theirs", "died in the layout")
    return found


@pytest.mark.model
def test_what_is_said_to_be_loadable_is_what_llama_cpp_runs(tmp_path: Path) -> None:
    files = damaged()
    paths = []
    for i, data in enumerate(files.values()):
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(data)
    said = both(paths, tmp_path / "kept")
    found = {name: said[str(i)] for i, name in enumerate(files)}
    assert found["whole"] == {"ours": "", "theirs": ""}
    assert len(found) >= 200
    disagree = {name: one for name, one in found.items() if bool(one["ours"]) != bool(one["theirs"])}
    assert set(disagree) == set(KNOWN), {name: one for name, one in disagree.items() if name not in KNOWN}


@pytest.mark.model
def test_every_fixture_that_llama_cpp_runs_is_said_to_be_loadable(tmp_path: Path) -> None:
    paths = [archs.make(name, tmp_path) for name in archs.names()]
    archs.need("archs/make_archs.py")
    said = both(paths, tmp_path / "kept")
    refused = {name: one["ours"] for name, one in said.items() if one["ours"] and not one["theirs"]}
    assert all("embedding" in why or "encoder" in why or "speech" in why for why in refused.values()), refused
    missed = {name: one["theirs"] for name, one in said.items() if one["theirs"] and not one["ours"]}
    assert missed == {}
