"""Quantized files of a reference, made once and kept by content."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import platformdirs

from qres import gguf_file
from qres.atomic import remove_leftovers, whole_file
from qres.errors import InputError, NativeError
from qres.file_stamp import Stamp, require_unchanged
from qres.gguf_file import Inventory
from qres.imatrix import Imatrix
from qres.levels import Level
from qres.native import worker

if TYPE_CHECKING:  # only the worker loads llama.cpp
    from qres.native.quantizer import Importance

OnProgress = Callable[[int, int], None]
SPARE_BYTES = 256 * 2**20
"""Left free on the disk beside the file."""


def default_folder() -> Path:
    """QRES_CACHE, or the place where caches belong on this system."""
    chosen = os.environ.get("QRES_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("qres")


def level_path(
    folder: Path, reference: Inventory, digest: str, level: Level, quantizer: str, imatrix: Imatrix | None = None
) -> Path:
    """Where a level of a reference lies: the folder is named by the reference's content and the quantizer's version.

    A level made with an importance matrix is another file, named by the matrix's content.
    """
    stem = re.sub(r"[^\w.+-]+", "_", reference.path.stem)[:80]
    made_with = f"-imatrix-{imatrix.digest[:16]}" if imatrix else ""
    return folder / "levels" / f"{digest[:24]}-{quantizer}" / f"{stem}-{level.name}{made_with}.gguf"


def make(
    reference: Inventory,
    level: Level,
    target: Path,
    threads: int,
    on_progress: OnProgress,
    note: Callable[[str], None] = lambda _: None,
    stamps: Sequence[Stamp] = (),
    imatrix: Imatrix | None = None,
) -> Inventory:
    """The level's file, from the cache or made now: written beside its final name, verified, then renamed.

    Args:
        reference: The 16-bit model.
        level: What to make.
        target: Where the file belongs.
        threads: For the quantizer.
        on_progress: Told (tensors done, tensors in all).
        note: Told when another scan is making the same file, which is waited for.
        stamps: Of the reference's files when their content was read, which names the target.
        imatrix: What to make it with; checked to be of the reference.

    Raises:
        InputError: no room, or the cache folder cannot be written.
        ChangedError: the reference changed meanwhile.
        NativeError: llama.cpp failed, or wrote something else than it was asked for.
    """
    found = _cached(target, reference, level)
    if found:
        return found
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, note):
            found = _cached(target, reference, level)  # made by whom we waited for
            if found:
                return found
            remove_leftovers(target.parent, re.escape(target.name))
            _make(reference, level, target, threads, on_progress, stamps, imatrix)
    except OSError as error:
        raise InputError(
            f"cannot write the cache folder {target.parent}: {error.strerror or error}", "choose another with --cache"
        ) from error
    return gguf_file.read(target)


@contextmanager
def _lock(target: Path, note: Callable[[str], None]) -> Iterator[None]:
    """One process at a time makes a file. The system takes the lock from a process that dies."""
    lock = filelock.FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        note(f"Waiting for another scan that is making {target.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(
    reference: Inventory,
    level: Level,
    target: Path,
    threads: int,
    on_progress: OnProgress,
    stamps: Sequence[Stamp],
    imatrix: Imatrix | None,
) -> None:
    free = shutil.disk_usage(target.parent).free
    needed = worker.run(_dry_run, lambda _: None, reference.path, level.ftype, threads, imatrix)
    if free < needed + SPARE_BYTES:
        raise InputError(
            f"{level.name} needs {needed / 2**20:,.0f} MiB in {target.parent}, {free / 2**20:,.0f} MiB are free",
            "free some space, or choose another folder with --cache",
        )
    try:
        with whole_file(target) as partial:
            worker.run(
                _quantize, lambda event: on_progress(*event), reference.path, partial, level.ftype, threads, imatrix
            )
            _verified(partial, reference, level)
            require_unchanged(stamps)  # the name promises what the level was made from
    except NativeError as error:
        require_unchanged(stamps)  # a mapped file that became shorter ends the process by a signal
        if shutil.disk_usage(target.parent).free < SPARE_BYTES:  # llama.cpp only says "iostream error"
            raise InputError(
                f"{level.name} could not be written: {target.parent} is full", "free some space, or use --cache"
            ) from error
        raise


def _cached(target: Path, reference: Inventory, level: Level) -> Inventory | None:
    """The level that is there; None for one that is damaged, or from an interrupted copy: it is made again."""
    if target.exists():
        with suppress(InputError, NativeError):
            return _verified(target, reference, level)
    return None


def _verified(path: Path, reference: Inventory, level: Level) -> Inventory:
    """The inventory of a made level, when it is whole and what was asked for."""
    inventory = gguf_file.read(path)
    difference = gguf_file.shape_difference(reference, inventory)
    if difference:
        raise NativeError(f"the {level.name} file differs from its reference: {difference}")
    if inventory.file_type != level.name:
        raise NativeError(f"llama.cpp wrote {inventory.file_type or 'no type'} where {level.name} was asked for")
    return inventory


def _quantize(
    emit: Callable[[object], None], source: Path, target: Path, ftype: int, threads: int, imatrix: Imatrix | None
) -> None:  # runs in the worker: only there is llama.cpp loaded
    from qres.native.quantizer import quantize

    quantize(source, target, ftype, threads, lambda done, total: emit((done, total)), _importance(imatrix))


def _dry_run(_emit: Callable[[object], None], source: Path, ftype: int, threads: int, imatrix: Imatrix | None) -> int:
    from qres.native.quantizer import quantized_bytes

    return quantized_bytes(source, ftype, threads, _importance(imatrix))


def _importance(imatrix: Imatrix | None) -> Importance | None:
    from qres.native.quantizer import Importance

    if imatrix is None:
        return None
    return Importance(imatrix.entries, imatrix.path.name, "".join(imatrix.datasets[:1]), imatrix.chunks)
