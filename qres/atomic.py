"""Files that appear whole or not at all: written beside their final name, then renamed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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


def remove_leftovers(folder: Path, names: str) -> None:
    """Take away what processes that were killed left half written; only for who is alone at work there.

    Args:
        folder: Where they wrote.
        names: A regular expression of the final names.
    """
    ours = re.compile(rf"\.(?:{names})\.\d+\.partial")
    for path in folder.glob(".*.partial"):
        if ours.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()
