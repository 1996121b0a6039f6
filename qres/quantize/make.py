"""llama.cpp's quantizer, run in the worker: files that appear whole and checked, or not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qres.errors import InputError, NativeError
from qres.files import Stamp, require_unchanged, whole_file
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.native import worker

if TYPE_CHECKING:
    from qres.native.quantizer import Importance


OnProgress = Callable[[int, int], None]
SPARE_BYTES = 256 * 2**20
"""Left free on the disk beside the file."""


def make_file(
    reference: Inventory,
    what: str,
    ftype: int,
    target: Path,
    threads: int,
    on_progress: OnProgress,
    stamps: Sequence[Stamp],
    imatrix: Imatrix | None,
    needed: int,
    check: Callable[[Path], object],
    types: Mapping[str, str] | None = None,
    instead: str = "--cache",
) -> None:
    """Make a file: beside its final name, checked, then renamed.

    Args:
        reference: The 16-bit model.
        what: What to call the file in messages.
        ftype: `llama_ftype` of the level.
        target: Where the file belongs.
        threads: For the quantizer.
        on_progress: Told (tensors done, tensors in all).
        stamps: Of the reference's files.
        imatrix: What to make it with; checked to be of the reference.
        needed: Bytes that it will take (`planned_bytes`).
        check: Called with the finished file before it is renamed; raises where it is not what was asked for.
        types: Tensor -> type, instead of the level's own choice.
        instead: Option that chooses another place.

    Raises:
        InputError: no room.
        ChangedError: the reference changed meanwhile.
        NativeError: llama.cpp failed.
        OSError: the file cannot be renamed.
    """
    free = shutil.disk_usage(target.parent).free
    if free < needed + SPARE_BYTES:
        raise InputError(
            f"{what} needs {needed / 2**20:,.0f} MiB in {target.parent}, {free / 2**20:,.0f} MiB are free",
            f"free some space, or choose another folder with {instead}",
        )
    try:
        with whole_file(target) as partial:
            worker.run(
                _quantize, lambda event: on_progress(*event), reference.path, partial, ftype, threads, imatrix, types
            )
            check(partial)
            require_unchanged(stamps)  # the file is said to be made from what was there before
    except NativeError as error:
        require_unchanged(stamps)  # a mapped file that became shorter ends the process by a signal
        if shutil.disk_usage(target.parent).free < SPARE_BYTES:  # llama.cpp only says "iostream error"
            raise InputError(
                f"{what} could not be written: {target.parent} is full", f"free some space, or use {instead}"
            ) from error
        raise


# -- in the worker: only there is llama.cpp loaded


def _quantize(
    emit: Callable[[object], None],
    source: Path,
    target: Path,
    ftype: int,
    threads: int,
    imatrix: Imatrix | None,
    types: Mapping[str, str] | None,
) -> None:
    from qres.native.quantizer import quantize

    quantize(source, target, ftype, threads, lambda done, total: emit((done, total)), importance(imatrix), types)


def importance(imatrix: Imatrix | None) -> Importance | None:
    """An importance matrix as llama.cpp's quantizer takes it."""
    from qres.native.quantizer import Importance

    if imatrix is None:
        return None
    return Importance(imatrix.entries, imatrix.path.name, "".join(imatrix.datasets[:1]), imatrix.chunks)
