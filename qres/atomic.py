"""Files that appear whole or not at all: written beside their final name, then renamed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from qres.errors import InputError


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
    path = path.resolve()
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} exists and is not a file", instead)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", instead) from error


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
