"""Quantized files of a reference, made once and kept by content."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import filelock
import platformdirs

from qres.errors import InputError, NativeError
from qres.events import Listener
from qres.files import Stamp, remove_leftovers
from qres.gguf import model_file
from qres.gguf.difference import shape_difference
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.levels import LevelSpec
from qres.quantize import ladder
from qres.quantize.make import OnProgress, make_file


def default_folder() -> Path:
    """QRES_CACHE, or the place where caches belong on this system."""
    chosen = os.environ.get("QRES_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("qres")


def level_path(
    folder: Path, reference: Inventory, digest: str, level: LevelSpec, quantizer: str, imatrix: Imatrix | None = None
) -> Path:
    """Where a level of a reference lies: the folder is named by the reference's content and the quantizer's version.

    A level made with an importance matrix is another file, named by the matrix's content.
    """
    stem = re.sub(r"[^\w.+-]+", "_", reference.path.stem)[:80]
    made_with = f"-imatrix-{imatrix.digest[:16]}" if imatrix else ""
    return folder / "levels" / f"{digest[:24]}-{quantizer}" / f"{stem}-{level.name}{made_with}.gguf"


def make(
    reference: Inventory,
    level: LevelSpec,
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
            (types,) = ladder.planned_types(reference, [level.ftype], threads, imatrix)
            make_file(
                *(reference, level.name, level.ftype, target, threads, on_progress, stamps, imatrix),
                needed=ladder.planned_bytes(reference, types),
                check=lambda partial: _verified(partial, reference, level),
            )
    except OSError as error:
        raise InputError(
            f"cannot write the cache folder {target.parent}: {error.strerror or error}", "choose another with --cache"
        ) from error
    return model_file.read(target)


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


def _cached(target: Path, reference: Inventory, level: LevelSpec) -> Inventory | None:
    """The level that is there; None for one that is damaged, or from an interrupted copy: it is made again."""
    if target.exists():
        with suppress(InputError, NativeError):
            return _verified(target, reference, level)
    return None


def _verified(path: Path, reference: Inventory, level: LevelSpec) -> Inventory:
    """The inventory of a made level, when it is whole and what was asked for."""
    inventory = model_file.read(path)
    difference = shape_difference(reference, inventory)
    if difference:
        raise NativeError(f"the {level.name} file differs from its reference: {difference}")
    if inventory.file_type != level.name:
        raise NativeError(f"llama.cpp wrote {inventory.file_type or 'no type'} where {level.name} was asked for")
    return inventory


def level_file(
    reference: Inventory,
    digest: str,
    level: LevelSpec,
    folder: Path,
    threads: int,
    listener: Listener,
    stamps: Sequence[Stamp],
    imatrix: Imatrix | None,
) -> Inventory:
    """A level's file, from the cache or made now; `digest` is of the reference's content.

    Raises:
        InputError: no room, a folder that cannot be written, or a reference that changed.
        NativeError: llama.cpp failed.
    """
    target = level_path(folder, reference, digest, level, version("llama-cpp-python"), imatrix)
    listener.stage(f"making {level.name}", None)
    return make(reference, level, target, threads, listener.step, listener.note, stamps, imatrix)
