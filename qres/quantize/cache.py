"""Quantized files of a reference, made once and kept by content."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import filelock
import platformdirs

from qres.errors import InputError, NativeError, reason_of
from qres.events import Listener
from qres.files import remove_leftovers
from qres.gguf import model_file
from qres.gguf.format.shards import prefix_of
from qres.gguf.inventory import Inventory
from qres.gguf.pairing import pair
from qres.levels import LevelSpec
from qres.quantize import ladder
from qres.quantize.make import make_file
from qres.quantize.original import Original


def default_folder() -> Path:
    """QRES_CACHE, or the place where caches belong on this system."""
    chosen = os.environ.get("QRES_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("qres")


def level_path(folder: Path, original: Original, level: LevelSpec, quantizer: str) -> Path:
    """Where a level of a model lies: the folder is named by the model's content and the quantizer's version.

    A level made with an importance matrix is another file, named by the matrix's content.
    """
    stem = re.sub(r"[^\w.+-]+", "_", prefix_of(original.reference.path))[:80]
    made_with = f"-imatrix-{original.imatrix.digest[:16]}" if original.imatrix else ""
    return folder / "levels" / f"{original.digest[:24]}-{quantizer}" / f"{stem}-{level.name}{made_with}.gguf"


def level_file(original: Original, level: LevelSpec, folder: Path, listener: Listener) -> Inventory:
    """A level's file, from the cache or made now: written beside its final name, verified, then renamed.

    Args:
        original: The 16-bit model, with its digest.
        level: What to make.
        folder: The cache.
        listener: Hears of progress, and when another scan is making the same file, which is waited for.

    Raises:
        InputError: no room, or the cache folder cannot be written.
        ChangedError: the original changed meanwhile.
        NativeError: llama.cpp failed, or wrote something else than it was asked for.
    """
    reference = original.reference
    target = level_path(folder, original, level, version("llama-cpp-python"))
    listener.stage(f"making {level.name}")
    found = _cached(target, reference, level)
    if found:
        return found
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, listener):
            found = _cached(target, reference, level)  # made by whom we waited for
            if found:
                return found
            remove_leftovers(target.parent, re.escape(target.name))
            (types,) = ladder.planned_types(original, [level.ftype])
            make_file(
                *(original, level.name, level.ftype, target, listener),
                needed=ladder.planned_bytes(reference, types),
                check=lambda partial: _verified(partial, reference, level),
            )
    except OSError as error:
        raise InputError(
            f"cannot write the cache folder {target.parent}: {reason_of(error)}", "choose another with --cache"
        ) from error
    return model_file.read(target)


@contextmanager
def _lock(target: Path, listener: Listener) -> Iterator[None]:
    """One process at a time makes a file. The system takes the lock from a process that dies."""
    lock = filelock.FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        listener.note(f"Waiting for another scan that is making {target.name}")
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
    difference = pair(reference, inventory).problem
    if difference:
        raise NativeError(f"the {level.name} file differs from its reference: {difference}")
    if inventory.file_type != level.name:
        raise NativeError(f"llama.cpp wrote {inventory.file_type or 'no type'} where {level.name} was asked for")
    return inventory
