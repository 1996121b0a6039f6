"""Did a file change while it was used? By size, time and identity, which takes no reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qres.errors import ChangedError, InputError


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
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
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
