"""What people pass in, where llama.cpp is needed: refused in one line, or scanned with nothing else left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tests import tiny
from tests.gguf.building import put, string
from tests.inputs import case as inputs
from tests.inputs.case import Build, Case, Outcome, Sandbox
from tests.inputs.names import RED, TRICKS

pytestmark = pytest.mark.model

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a level of it, and a cache that all tests share."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_llama(folder / "tiny.gguf")
    tiny.write_llama(folder / "q8.gguf", change=to_q8)
    (folder / "cache").mkdir()
    return folder


def to_q8(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    """Matrices as Q8_0."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return (gguf.quantize(values, kind), kind) if values.ndim > 1 else tiny.keep(name, values)


@pytest.fixture
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A sandbox with the model in it and the shared cache outside."""
    made = inputs.sandbox(tmp_path, monkeypatch)
    for name in ("tiny.gguf", "q8.gguf"):
        os.link(models / name, made.work / name)
    monkeypatch.setenv("QRES_CACHE", str(models / "cache"))
    return made


def run(arguments: Sequence[str], stdin: bytes | None = b"") -> Outcome:
    """`qres` as a process, in the current folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.undrawn", *map(os.fsencode, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        input=stdin,
        capture_output=True,
        timeout=600,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


QUICK = ("--n-ctx", "64", "--chunks", "1", "--rank-chunks", "1", "--threads", "1")


def source(option: str, data: bytes) -> Build:
    """A scan of the model on a text or on token ids."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, data, "t.txt")
        return ["scan", "tiny.gguf", option, "t.txt", *QUICK]

    return make


def changed(change: Callable[[bytes], bytes], name: str = "bad.gguf") -> Build:
    """A scan of the model after a change to its bytes."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, change((folder / "tiny.gguf").read_bytes()), name)
        return ["scan", name, *QUICK]

    return make


def swap(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """The same number of bytes, found once in the file."""

    def change(data: bytes) -> bytes:
        assert len(old) == len(new)
        assert data.count(old) >= 1
        return data.replace(old, new)

    return change


def cache_is_a_file(folder: Path) -> Sequence[str]:
    """--cache names something that is there already."""
    put(folder, b"mine", "c")
    return ["scan", "tiny.gguf", "--levels", "Q8_0", "--cache", "c", *QUICK]


def few(n: int) -> tuple[str, ...]:
    """What is said about a text of so many tokens."""
    return (f"t.txt has {n} tokens, at least 32 are needed", "Give a longer text with --text")


SHORT = [
    inputs.case("31-tokens", "one too few", source("--text", b"a" * 31), *few(31)),
    inputs.case("begin-of-text-in-words", "a special token's name stays text", source("--text", b"<s>" * 10), *few(30)),
    inputs.case("end-of-text-in-words", "the same", source("--text", b"<|endoftext|>" * 2), *few(26)),
    inputs.case("marks-of-windows", "are no text", source("--text", b"\xef\xbb\xbf" + b"a\r\n" * 10), *few(20)),
    inputs.case(
        "few-ids",
        "three token ids",
        source("--tokens", b"1 2 3"),
        "t.txt has 3 tokens",
        "32 are needed",
        "more ids with --tokens",
    ),
    inputs.case(
        "ids-beyond-the-vocabulary",
        "from standard input",
        lambda _: ["scan", "tiny.gguf", "--tokens", "-", *QUICK],
        "standard input: token id 258 is outside the model's vocabulary of 258",
        "this model's own tokenizer",
        stdin=b"1 2 257 258 " * 20,
    ),
]

NATIVE = [
    inputs.case(
        "gpu-without-a-gpu",
        "layers for a GPU that llama.cpp cannot use",
        lambda _: ["scan", "tiny.gguf", "--n-gpu-layers", "9", *QUICK],
        "built without a GPU backend",
        "Leave --n-gpu-layers out",
        code=4,
    ),
    inputs.case(
        "cache-a-file",
        "a file as --cache",
        cache_is_a_file,
        "cannot write the cache folder c/levels",
        "Choose another with --cache",
    ),
    inputs.case(
        "unknown-architecture",
        "a model newer than llama.cpp",
        changed(swap(string("llama"), string("lluma"))),
        "llama.cpp cannot load bad.gguf",
        "unknown model architecture: 'lluma'",
        "pdate",
        code=4,
    ),
    inputs.case(
        "tensor-missing",
        "a tensor by another name",
        changed(swap(b"blk.1.ffn_up.weight", b"blk.1.ffn_ut.weight")),
        "llama.cpp cannot load bad.gguf",
        "'blk.1.ffn_up.weight' not found",
        "Get the file again",
    ),
    inputs.case(
        "name-that-is-no-utf-8",
        "a damaged file by it",
        changed(lambda data: data[:9000], "m\udcff.gguf"),
        "m\ufffd.gguf is",
        "truncated",
    ),
]


@pytest.mark.parametrize("case", inputs.params(SHORT, NATIVE))
def test_refused(place: Sandbox, models: Path, case: Case) -> None:
    arguments = case.build(place.work)
    before = inputs.snapshot(place.root), inputs.snapshot(models)
    found = run(arguments, case.stdin)
    inputs.assert_refused(found, case.code, case.words, case.without)
    assert (inputs.snapshot(place.root), inputs.snapshot(models)) == before


# ---------------------------------------------------------------- scans that go well


def scanned(place: Sandbox, models: Path, *arguments: str) -> tuple[Outcome, dict[str, Any]]:
    """A scan into `out`, and its result; besides the reports only levels in the cache are new."""
    before, cached = inputs.snapshot(place.root), inputs.snapshot(models)
    found = run([*arguments, "--out", "out", *QUICK])
    inputs.assert_shown(found, ("Report: out/report.html",))
    after = inputs.snapshot(place.root)
    assert before.items() <= after.items()
    new = {name.removeprefix("work/out") for name in after.keys() - before.keys()}
    assert {name for name in new if not name.startswith("/charts")} == REPORTS
    assert all(map(_is_of_a_level, inputs.snapshot(models).keys() - cached.keys()))
    result: dict[str, Any] = json.loads((place.work / "out" / "result.json").read_text(encoding="utf-8"))
    return found, result


REPORTS = {"", "/report.html", "/report.md", "/result.json"}


def _is_of_a_level(name: str) -> bool:
    """A folder, a level or its lock in the cache, by a name that every system takes."""
    parts = Path(name).parts
    return parts[:2] == ("cache", "levels") and all(re.fullmatch(r"[\w.+-]+", part) for part in parts)


def test_scan_of_a_model_made_to_mislead(place: Sandbox, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name and the texts in its header try something; nothing is run, or written elsewhere."""
    everything, add_name = " ".join(TRICKS.values()), gguf.GGUFWriter.add_name

    def disguise(writer: gguf.GGUFWriter, _name: str) -> None:
        add_name(writer, everything)
        writer.add_chat_template("{{ cycler.__init__.__globals__.os.system('touch pwned') }}{{ 7 * 7 }}")

    monkeypatch.setattr(gguf.GGUFWriter, "add_name", disguise)
    tiny.write_llama(place.work / RED)
    _, result = scanned(place, models, "scan", RED, "--levels", "Q8_0")
    assert result["reference"]["name"] == everything
    for name in ("report.html", "report.md", "result.json"):
        text = (place.work / "out" / name).read_text(encoding="utf-8")
        assert "cycler" not in text  # the template is not even shown
        assert "<script>alert" not in text or name == "result.json"


def test_scan_of_the_reference_as_a_level(place: Sandbox, models: Path) -> None:
    found, result = scanned(place, models, "scan", "tiny.gguf", "q8.gguf", "tiny.gguf")
    assert "tiny.gguf is the reference itself: every difference will be 0" in found.err
    small, same = result["levels"]
    assert small["output"]["kld_mean"] > same["output"]["kld_mean"] == 0


def test_scan_of_an_odd_name(place: Sandbox, models: Path) -> None:
    name = "m\udcff 50% größe 🦙.gguf"
    (place.work / "tiny.gguf").rename(place.work / name)
    _, result = scanned(place, models, "scan", "--levels", "Q8_0", f"./{name}")
    shown = name.replace("\udcff", "\ufffd")
    assert result["reference"]["path"].endswith(shown)
    for report in ("report.html", "report.md"):
        assert shown in (place.work / "out" / report).read_text(encoding="utf-8")
