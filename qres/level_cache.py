"""Quantized files of a reference, made once and kept by content."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import platformdirs

from qres import gguf_file
from qres.errors import InputError, NativeError
from qres.gguf_file import Inventory
from qres.levels import Level
from qres.native import worker

OnProgress = Callable[[int, int], None]
SPARE_BYTES = 256 * 2**20
"""Left free on the disk beside the file."""
_STALE_S = 86_400.0


def default_folder() -> Path:
    """QRES_CACHE, or the place where caches belong on this system."""
    chosen = os.environ.get("QRES_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("qres")


def level_path(folder: Path, reference: Inventory, digest: str, level: Level, quantizer: str) -> Path:
    """Where a level of a reference lies: the folder is named by the reference's content and the quantizer's version."""
    stem = re.sub(r"[^\w.+-]+", "_", reference.path.stem)[:80]
    return folder / "levels" / f"{digest[:24]}-{quantizer}" / f"{stem}-{level.name}.gguf"


def make(reference: Inventory, level: Level, target: Path, threads: int, on_progress: OnProgress) -> Inventory:
    """The level's file, from the cache or made now: written beside its final name, verified, then renamed.

    Raises:
        InputError: no room, or the cache folder cannot be written.
        NativeError: llama.cpp failed, or wrote something else than it was asked for.
    """
    try:
        if target.exists():
            try:
                return _verified(target, reference, level)
            except (InputError, NativeError):
                target.unlink()  # damaged or from an interrupted copy: make it again
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise InputError(
            f"cannot write the cache folder {target.parent}: {error.strerror}", "choose another with --cache"
        ) from error
    needed = worker.run(_dry_run, lambda _: None, reference.path, level.ftype, threads)
    if free < needed + SPARE_BYTES:
        raise InputError(
            f"{level.name} needs {needed / 2**20:,.0f} MiB in {target.parent}, {free / 2**20:,.0f} MiB are free",
            "free some space, or choose another folder with --cache",
        )
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        worker.run(_quantize, lambda event: on_progress(*event), reference.path, partial, level.ftype, threads)
        _verified(partial, reference, level)
        partial.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return gguf_file.read(target)


def _remove_stale(target: Path) -> None:
    """Take away what a scan that was killed left behind: no level takes a day to make."""
    for partial in target.parent.glob(f".{target.name}.*.partial"):
        if time.time() - partial.stat().st_mtime > _STALE_S:
            partial.unlink(missing_ok=True)


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
    emit: Callable[[object], None], source: Path, target: Path, ftype: int, threads: int
) -> None:  # runs in the worker: only there is llama.cpp loaded
    from qres.native.quantizer import quantize

    quantize(source, target, ftype, threads, lambda done, total: emit((done, total)))


def _dry_run(_emit: Callable[[object], None], source: Path, ftype: int, threads: int) -> int:
    from qres.native.quantizer import quantized_bytes

    return quantized_bytes(source, ftype, threads)
