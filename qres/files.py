"""Files that appear whole or not at all, and files that must not change while they are used.

Written beside their final name, then renamed, and never over what is read; a change is told by size, time and identity,
which takes no reading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from qres.errors import ChangedError, InputError, reason_of

_SHARD = re.compile(r"(?P<prefix>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)
"""The name of a shard, as llama.cpp writes it."""


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes `target` when the work is done, and goes when it fails.

    Raises:
        OSError: it cannot be renamed; what `target` was before is still there.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        with suppress(OSError):  # renamed, or never made
            partial.unlink()


def write_text(path: Path, text: str, instead: str) -> None:
    """Write a text file whole; a link stays a link, and what it leads to is replaced.

    Args:
        path: The file; its folder is made if it is not there.
        text: What to write.
        instead: What to do where it cannot be written.

    Raises:
        InputError: it cannot be written, or there is something else by its name.
    """
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            raise InputError(f"{path} exists and is not a file", instead)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise InputError(f"cannot write {path}: {reason_of(error)}", instead) from error


def _paths_of_model(path: Path) -> Iterator[Path]:
    """A file and, of a shard, those beside it, by their names."""
    yield path
    match = _SHARD.fullmatch(path.name)
    if match:
        for number in range(1, int(match["count"]) + 1):
            yield path.with_name(f"{match['prefix']}-{number:05d}-of-{match['count']}.gguf")


def protect(outputs: Iterable[Path], inputs: Iterable[Path | None], instead: str) -> None:
    """Refuse to write over an input, whatever name or link leads to it.

    Args:
        outputs: Every file that is going to be written.
        inputs: What is read; None for what was not given. Of a split model any shard stands for all.
        instead: What to do.

    Raises:
        InputError: an output is an input.
    """
    there = {identity: path for path in outputs if (identity := _identity(path))}
    if not there:
        return
    for given in inputs:
        for path in _paths_of_model(given) if given else ():
            identity = _identity(path)
            if identity in there:
                raise InputError(f"{there[identity]} is an input and would be overwritten", instead)


def _identity(path: Path) -> tuple[int, int] | None:
    """What file a name leads to, links followed; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # not there, a loop of links, a name that no file can have
        return None
    return status.st_dev, status.st_ino


def remove_leftovers(folder: Path, names: str, *, dead_only: bool = False) -> None:
    """Take away what processes that were killed left half written.

    Args:
        folder: Where they wrote.
        names: A regular expression of the final names.
        dead_only: Leave files of processes that are alive, for who may not be alone at work there.
    """
    ours = re.compile(rf"\.(?:{names})\.(?P<pid>\d+)\.partial")
    for path in folder.glob(".*.partial"):
        match = ours.fullmatch(path.name)
        if match and not (dead_only and psutil.pid_exists(int(match["pid"]))):
            with suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class Stamp:
    """One file at one moment."""

    path: Path
    size: int
    modified_ns: int
    inode: int
    device: int


def stamp(path: Path) -> Stamp:
    """The file as it is now.

    Raises:
        InputError: it is not there.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return Stamp(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def require_unchanged(stamps: Iterable[Stamp]) -> None:
    """Refuse to go on with files that are no longer what they were.

    A file that was removed or replaced is still mapped as it was; a level that another process takes out of the cache
    does no harm. What counts is a file that is written to.

    Raises:
        ChangedError: a file changed.
    """
    for known in stamps:
        try:
            now = stamp(known.path)
        except InputError:
            continue
        if (now.inode, now.device) != (known.inode, known.device):
            continue
        if now != known:
            raise ChangedError(
                f"{known.path} changed while it was measured", "nothing was reported; scan again when it is complete"
            )
