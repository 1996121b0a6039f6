"""llama.cpp's quantizer, run in the worker: files that appear whole and checked, or not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qres.errors import InputError, NativeError
from qres.events import Listener
from qres.files import require_unchanged, whole_file
from qres.gguf.imatrix import Imatrix
from qres.native import worker
from qres.quantize.original import Original

if TYPE_CHECKING:  # only the worker loads llama.cpp
    from qres.native.quantizer import Importance

SPARE_BYTES = 256 * 2**20
"""Left free on the disk beside the file."""


def make_file(
    original: Original,
    what: str,
    ftype: int,
    target: Path,
    listener: Listener,
    *,
    needed: int,
    check: Callable[[Path], object],
    types: Mapping[str, str] | None = None,
    instead: str = "--cache",
) -> None:
    """Make a file: beside its final name, checked, then renamed.

    Args:
        original: What to make it from.
        what: What to call the file in messages.
        ftype: `llama_ftype` of the level.
        target: Where the file belongs.
        listener: Hears of (tensors done, tensors in all).
        needed: Bytes that it will take (`planned_bytes`).
        check: Called with the finished file before it is renamed; raises where it is not what was asked for.
        types: Tensor -> type, instead of the level's own choice.
        instead: Option that chooses another place.

    Raises:
        InputError: no room.
        ChangedError: the original changed meanwhile.
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
            run = (original.reference.path, partial, ftype, original.threads, original.imatrix)
            worker.run(_QuantizeTask(*run, original.types(types)), listener)
            check(partial)
            require_unchanged(original.stamps)  # the file is said to be made from what was there before
    except NativeError as error:
        require_unchanged(original.stamps)  # a mapped file that became shorter ends the process by a signal
        if shutil.disk_usage(target.parent).free < SPARE_BYTES:  # llama.cpp only says "iostream error"
            raise InputError(
                f"{what} could not be written: {target.parent} is full", f"free some space, or use {instead}"
            ) from error
        raise


# -- in the worker: only there is llama.cpp loaded


@dataclass(frozen=True)
class _QuantizeTask:
    """Write a file with llama.cpp's quantizer."""

    source: Path
    target: Path
    ftype: int
    threads: int
    imatrix: Imatrix | None
    types: Mapping[str, str] | None

    def work(self, listener: Listener) -> None:
        from qres.native.quantizer import quantize

        given = importance(self.imatrix)
        quantize(self.source, self.target, self.ftype, self.threads, listener.step, given, self.types)


def importance(imatrix: Imatrix | None) -> Importance | None:
    """An importance matrix as llama.cpp's quantizer takes it."""
    from qres.native.quantizer import Importance

    if imatrix is None:
        return None
    return Importance(imatrix.entries, imatrix.path.name, "".join(imatrix.datasets[:1]), imatrix.chunks)
