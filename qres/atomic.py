"""Files that appear whole or not at all: written beside their final name, then renamed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


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
