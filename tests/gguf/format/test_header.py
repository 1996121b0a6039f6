"""Headers that are refused with a reason, paths that are no files, and headers cut anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qres.errors import InputError, UnsupportedError
from qres.gguf import model_file
from qres.gguf.format.metadata import Unreadable
from qres.printable import show
from tests.gguf.building import LLAMA, ROWS, VALID, build, parsed, put, swapped
from tests.gguf.format.seeds import BROKEN

# ---------------------------------------------------------------- valid files


def test_version_2_and_missing_last_padding(tmp_path: Path) -> None:
    found = model_file.read(put(tmp_path, build(LLAMA, ROWS, 856, version=2)))  # data ends with the last weight
    assert (found.version, len(found.tensors)) == (2, 3)


# ---------------------------------------------------------------- what is not a usable file


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_explained(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    with pytest.raises((InputError, UnsupportedError), match=message) as caught:
        model_file.read(put(tmp_path, data))
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert str(tmp_path) in caught.value.message


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        model_file.read(tmp_path / "missing.gguf")
    put(tmp_path, VALID, "a.gguf")
    with pytest.raises(InputError, match=r"is a directory.*such as a\.gguf"):
        model_file.read(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        model_file.read(tmp_path / "a.gguf" / "b.gguf")
    with pytest.raises(InputError, match="cannot read"):
        model_file.read(Path("nul\0byte"))
    with pytest.raises(InputError, match="cannot read"):
        model_file.read(tmp_path / ("x" * 5000))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InputError, match="not a regular file"):
        model_file.read(tmp_path / "pipe.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = put(tmp_path, VALID)
    path.chmod(0)
    with pytest.raises(InputError, match="no permission"):
        model_file.read(path)


def test_control_characters_stay_out_of_messages(tmp_path: Path) -> None:
    rows = [("evil\n\x1b[31m", (2**40,), 0, 0)]
    with pytest.raises(InputError, match="truncated") as caught:
        model_file.read(put(tmp_path, build(LLAMA, rows, 64), "line\nbreak.gguf"))
    assert str(caught.value).isprintable()
    assert len(show("x" * 9999)) < 200


# ---------------------------------------------------------------- tolerant reading


def test_wrong_alignment_reads_as_32() -> None:
    found = parsed(build(LLAMA | {"general.alignment": 24}, ROWS, 896))
    whole = parsed(build(LLAMA | {"general.alignment": 32}, ROWS, 896))
    assert found.tensors == whole.tensors
    assert [p.message for p in found.problems] == ["damaged: general.alignment is 24, not a power of two"]


def test_header_cut_anywhere_keeps_what_came_before() -> None:
    whole = parsed(VALID)
    keys, names = list(whole.metadata), [t.name for t in whole.tensors]
    read = 0
    for size in range(24, whole.tensors[0].offset):
        found = parsed(VALID[:size])
        assert found.problems, size
        rows = len(found.metadata) + len(found.tensors)
        assert (list(found.metadata), [t.name for t in found.tensors]) == (
            keys[: len(found.metadata)],
            names[: rows - len(found.metadata)],
        )
        assert {
            k: v for k, v in found.metadata.items() if not isinstance(v, Unreadable)
        }.items() <= whole.metadata.items()
        assert rows >= read - 1, size  # a key whose value is cut off comes and may go
        read = max(read, rows)
    assert read == len(keys) + len(names)


@pytest.mark.parametrize(
    "data", [b"", b"GG", b"tjgg" + bytes(60), b"GGUF", VALID[:20], build(version=99), swapped(VALID)]
)
def test_what_is_no_gguf_is_refused_all_the_same(tmp_path: Path, data: bytes) -> None:
    with pytest.raises((InputError, UnsupportedError)):
        model_file.read(put(tmp_path, data), tolerant=True)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError):
            model_file.read(path, tolerant=True)
