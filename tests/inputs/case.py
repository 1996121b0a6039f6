"""What people pass in, built by code: a case, how it is run in a sandbox, and what every refusal has to look like."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest

from qres.cli.program import main
from qres.errors import NativeError
from qres.native import loadable
from qres.pipeline import demo
from qres.pipeline import run as scan_module
from tests.gguf.building import LLAMA, Row, Typed, build, put

Build = Callable[[Path], Sequence[str]]
"""Puts files into a folder, which is the current one of the run, and returns the arguments of qres."""


@dataclass(frozen=True)
class Case:
    """One thing that a user may type."""

    id: str
    what: str
    """The input, in words."""
    build: Build
    code: int
    words: tuple[str, ...]
    """All of them have to be in the message; of a case with exit code 0, in what is printed."""
    without: tuple[str, ...] = ()
    """None of them may be there."""
    stdin: bytes | None = b""
    """None: closed."""
    not_root: bool = False
    """Root may do what nobody else may."""


def case(
    id: str,
    what: str,
    build: Build,
    *words: str,
    code: int = 3,
    without: tuple[str, ...] = (),
    stdin: bytes | None = b"",
    not_root: bool = False,
) -> Case:
    """A case; most of them are refused as bad input."""
    return Case(id, what, build, code, words, without, stdin, not_root)


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    code: int
    out: str
    err: str


def params(*tables: Iterable[Case]) -> list[object]:
    """The cases as parameters of a test."""
    return [pytest.param(case, id=case.id, marks=_marks(case)) for table in tables for case in table]


@cache
def _is_root() -> bool:
    """No permission keeps this process from anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.touch(0)
        return os.access(path, os.R_OK)


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skipif(_is_root(), reason="root may do it")] if case.not_root else []


# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Sandbox:
    """Folders that a run can reach by itself: its home, the one for temporary files, and the current one."""

    root: Path

    @property
    def work(self) -> Path:
        """The current folder."""
        return self.root / "work"

    @property
    def cache_folder(self) -> Path:
        """The only one that is told to qres, by QRES_CACHE."""
        return self.root / "cache"

    def environment(self) -> dict[str, str]:
        """What points a process into the sandbox."""
        return {
            "HOME": str(self.root / "home"),
            "XDG_CACHE_HOME": str(self.root / "home" / ".cache"),
            "TMPDIR": str(self.root / "tmp"),
            "QRES_CACHE": str(self.cache_folder),
        }


_LOOKS = ("QRES_DEBUG", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "COLUMNS")


def sandbox(root: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A sandbox that this process is in until the test ends."""
    made = Sandbox(root)
    for name in ("work", "home", "tmp", "cache"):
        (root / name).mkdir()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    for name in _LOOKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(made.work)
    return made


def run(arguments: Sequence[str], stdin: bytes | None = b"") -> Outcome:
    """`qres` in this process, with these bytes on standard input."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    given = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
    with (
        mock.patch.object(sys, "stdin", given),
        mock.patch.object(scan_module, "_preflight", _accepted),
        mock.patch.object(demo, "reference", _accepted),
        mock.patch.object(loadable, "refusal", return_value=None),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main(arguments)
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())


ACCEPTED = 5
"""Exit code of a scan whose arguments are all right: what would start llama.cpp, or make a model, ends it here."""


def _accepted(*_: object) -> NoReturn:
    raise NativeError("all checks are passed", "this test goes no further")


def snapshot(folder: Path) -> dict[str, object]:
    """Everything below a folder: what it is, and the bytes of the files."""
    return {os.fsdecode(os.path.relpath(path, folder)): _state(path) for path in sorted(folder.rglob("*"))}


def _state(path: Path) -> object:
    status = path.lstat()
    if stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK):
        big = status.st_size > 1 << 24  # sparse, and never written by qres
        return status.st_size, status.st_mtime_ns, "" if big else hashlib.sha256(path.read_bytes()).hexdigest()
    return path.readlink() if path.is_symlink() else stat.S_IFMT(status.st_mode)


# ---------------------------------------------------------------- what a refusal looks like

_NOTES = re.compile(
    r"(?:Needs about|The models take|This scan needs|Taken as the reference:|The reference .+ is .+, not 16 bit:) .+"
    r"|.+ (?:was given twice|is the reference itself): .+|.+: block \d+ \(NextN, .+"
    r"|.+ holds the same tensors as the reference: .+"
)
"""Lines that may come before the message."""
_ADVICE = re.compile(r"qres: .*?\S[.?] (?:(?:llama|qres|[A-Z]|\S+ lies beside it).*\.|.*cat .+ > .+)")
"""What is wrong, and in a second sentence what to do; a command ends without a full stop."""


def assert_refused(found: Outcome, code: int, words: Sequence[str], without: Sequence[str] = ()) -> None:
    """One line says what is wrong and what to do, and nothing else is printed."""
    *notes, line = found.err.splitlines() or [""]
    assert found.code == code, found.err
    assert found.out == ""
    assert found.err.endswith("\n")
    assert line.startswith("qres: "), found.err
    assert all(map(_NOTES.match, notes)), notes
    assert "Traceback" not in found.err
    assert all(map(str.isprintable, (*notes, line))), found.err
    for word in words:
        assert word in (found.err if code == ACCEPTED else line), found.err
    for word in without:
        assert word not in found.err
    assert _ADVICE.fullmatch(line), f"no advice: {line}"


def assert_shown(found: Outcome, words: Sequence[str], without: Sequence[str] = ()) -> None:
    """The run went well and says these things."""
    assert (found.code, "Traceback" in found.err) == (0, False), found.err
    assert all(map(str.isprintable, (found.out + found.err).split("\n"))), found.out
    text = " ".join((found.out + found.err).split())  # as a narrow table wraps it
    for word in words:
        assert word in text
    for word in without:
        assert word not in text


def check(case: Case, folder: Path, root: Path) -> None:
    """Build the input of a case, run it, and look at what was said and what was left."""
    arguments = case.build(folder)
    before = snapshot(root)
    found = run(arguments, case.stdin)
    if case.code:
        assert_refused(found, case.code, case.words, case.without)
    else:
        assert_shown(found, case.words, case.without)
    assert snapshot(root) == before


# ---------------------------------------------------------------- builders

HEADER: dict[str, object] = {
    **{key: value for key, value in LLAMA.items() if key != "llama.nextn_predict_layers"},
    "general.file_type": 1,
    "llama.block_count": 1,
}
"""Of a 16-bit model."""
FULL: list[Row] = [
    ("token_embd.weight", (64, 4), 1, 0),  # F16: 512 bytes
    ("blk.0.attn_norm.weight", (64,), 0, 512),  # F32: 256
    ("blk.0.ffn_up.weight", (64, 2), 1, 768),  # F16: 256
]
SMALL: list[Row] = [
    ("token_embd.weight", (64, 4), 8, 0),  # Q8_0: 272 bytes
    ("blk.0.attn_norm.weight", (64,), 0, 288),  # F32: 256
    ("blk.0.ffn_up.weight", (64, 2), 8, 544),  # Q8_0: 136
]
ROOM = 1024
"""Bytes of data behind either."""


def full(changes: Mapping[str, object] | None = None, rows: Sequence[Row] = FULL) -> bytes:
    """A 16-bit model, as far as its header tells; llama.cpp could not load it."""
    return _filled(build(HEADER | dict(changes or {}), rows, ROOM))


def small(changes: Mapping[str, object] | None = None, rows: Sequence[Row] = SMALL) -> bytes:
    """The same model at Q8_0."""
    return _filled(build(HEADER | {"general.file_type": 7} | dict(changes or {}), rows, ROOM))


def _filled(data: bytes) -> bytes:
    """With ones for data: a file that ends in zeros was not downloaded to its end."""
    return data[:-ROOM] + b"\1" * ROOM


def scan(data: bytes, *options: str, name: str = "m.gguf") -> Build:
    """A scan of one file with these bytes."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, data, name)
        return ["scan", name, *options]

    return make


def inspect(data: bytes, *options: str, name: str = "m.gguf") -> Build:
    """An inspection of one file with these bytes."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, data, name)
        return ["inspect", name, *options]

    return make


def pair(reference: bytes, candidate: bytes, *options: str) -> Build:
    """A scan of ref.gguf against cand.gguf."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, reference, "ref.gguf")
        put(folder, candidate, "cand.gguf")
        return ["scan", "ref.gguf", "cand.gguf", *options]

    return make


def typed(arguments: str) -> Build:
    """Arguments without any file."""
    return lambda _folder: arguments.split()


def u64(number: int) -> bytes:
    """As GGUF writes lengths."""
    return struct.pack("<Q", number)


def array(element_type: int, count: int, elements: bytes = b"") -> Typed:
    """An array that may lie about its length."""
    return Typed(9, struct.pack("<IQ", element_type, count) + elements)
