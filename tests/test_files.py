"""A file that is written to while it is measured ends the scan; one that is taken away or replaced does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qres.errors import InputError
from qres.files import require_unchanged, stamp

DATA = bytes(range(256)) * 16


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Written a while ago: file systems count time in steps of milliseconds, and a change comes later."""
    path = tmp_path / "model.gguf"
    path.write_bytes(DATA)
    os.utime(path, ns=(10**18, 10**18))
    return path


def append(path: Path) -> None:
    with path.open("ab") as out:
        out.write(b"more")


def rewrite(path: Path) -> None:
    with path.open("r+b") as out:
        out.write(bytes(len(DATA)))


def write_the_same(path: Path) -> None:
    """The same bytes again are still a write: what was read in between is not known."""
    with path.open("r+b") as out:
        out.write(DATA)


def change_one_byte(path: Path) -> None:
    with path.open("r+b") as out:
        out.seek(100)
        out.write(b"!")


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def truncate_and_fill(path: Path) -> None:
    """A download that begins again: in between, a mapped file would have killed the process."""
    os.truncate(path, 0)
    path.write_bytes(DATA)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "change", [append, rewrite, write_the_same, change_one_byte, truncate, truncate_and_fill, empty]
)
def test_file_that_is_written_to_is_refused(file: Path, change: Callable[[Path], None]) -> None:
    known = stamp(file)
    change(file)
    with pytest.raises(InputError) as caught:
        require_unchanged([known])
    assert caught.value.message == f"{file} changed while it was measured"
    assert "scan again" in caught.value.hint


def test_file_that_only_got_another_time_is_refused(file: Path) -> None:
    known = stamp(file)
    os.utime(file, ns=(10**18, 10**18 + 1))
    with pytest.raises(InputError, match="changed"):
        require_unchanged([known])


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """As a cache does: written beside it, then renamed. Whoever had the old file open keeps it."""
    other = path.with_name("new")
    other.write_bytes(DATA * 2)
    other.replace(path)


def remove_the_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def read(path: Path) -> None:
    assert path.read_bytes() == DATA


def link(path: Path) -> None:
    path.with_name("link.gguf").hardlink_to(path)


def nothing(_path: Path) -> None:
    pass


@pytest.mark.parametrize("change", [nothing, read, link, remove, replace, remove_the_folder])
def test_file_that_is_not_written_to_is_fine(file: Path, change: Callable[[Path], None]) -> None:
    known = stamp(file)
    change(file)
    require_unchanged([known])


def test_file_that_came_through_a_link_is_looked_at_itself(file: Path) -> None:
    link = file.with_name("link.gguf")
    link.symlink_to(file)
    known = stamp(link)
    require_unchanged([known])
    append(file)
    with pytest.raises(InputError, match=r"link\.gguf changed"):
        require_unchanged([known])


def test_link_that_leads_elsewhere_now_is_a_replaced_file(file: Path) -> None:
    link = file.with_name("link.gguf")
    link.symlink_to(file)
    known = stamp(link)
    other = file.with_name("other.gguf")
    other.write_bytes(b"other")
    link.unlink()
    link.symlink_to(other)
    require_unchanged([known])


def test_changed_file_among_others_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"shard-{i}.gguf" for i in range(3)]
    for path in paths:
        path.write_bytes(DATA)
    stamps = [stamp(path) for path in paths]
    paths[0].unlink()
    append(paths[2])
    with pytest.raises(InputError, match=r"shard-2\.gguf changed"):
        require_unchanged(stamps)
    require_unchanged(stamps[:2])
    require_unchanged([])


def test_stamp_is_the_same_until_the_file_changes(file: Path) -> None:
    assert stamp(file) == stamp(file)
    before = stamp(file)
    append(file)
    assert stamp(file) != before
    assert stamp(file).size == len(DATA) + 4


def test_stamp_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.gguf: No such file"):
        stamp(tmp_path / "none.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    with pytest.raises(InputError, match=r"loop\.gguf"):
        stamp(tmp_path / "loop.gguf")
