"""What the numbers of the tensors are: largest magnitude, NaN, infinities. The one pass over a file's weights.

The data is read, not mapped: a mapped file that is cut off while it is looked at ends the process.

Floats are never computed with. Without its sign bit an IEEE float orders like an unsigned integer, and every pattern
from that of infinity on is not finite; so masking and an integer maximum do, at the speed of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from qres import levels
from qres.errors import InputError, reason_of
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.levels import F16_MAX
from qres.printable import show

_RANGE_WEIGHTS = 1 << 24
"""What one thread takes at a time, in pieces: some 10,000 ranges for a file of 100 GB."""
_PIECE_BYTES = 1 << 20
"""Floats looked at in one go, about what a second-level cache holds: with 16 MiB the scan takes half as long again."""
_PIECE_WEIGHTS = 1 << 18
"""Quantized weights decoded in one go, to float32: with 4 times as many, K-quants take up to 4 times as long."""


@dataclass(frozen=True)
class Magnitudes:
    """What was found in one tensor."""

    tensor: str
    absmax: float = 0.0
    """Largest finite magnitude; 0 when there is none."""
    n_nan: int = 0
    n_inf: int = 0
    first_bad: int | None = None
    """Index of the first value that is not finite, counted through the tensor in file order."""
    not_checked: str = ""
    """Why the data was not looked at; empty when it was."""

    @property
    def checked(self) -> bool:
        """The data was looked at."""
        return not self.not_checked

    @property
    def n_bad(self) -> int:
        """Values that are not finite."""
        return self.n_nan + self.n_inf

    @property
    def only_zeros(self) -> bool:
        """Every value is 0."""
        return self.checked and self.absmax == 0 and not self.n_bad

    @property
    def beyond_f16(self) -> bool:
        """A finite value does not fit 16-bit float."""
        return self.absmax > F16_MAX

    @property
    def near_f16(self) -> bool:
        """A finite value is in the upper half of the range of 16-bit float, or beyond it."""
        return self.absmax > F16_MAX / 2


@dataclass(frozen=True)
class _Float:
    """A float format, its bits seen as an unsigned integer."""

    bits: np.dtype[Any]
    infinity: int
    """The bits of +infinity: the exponent's, all set. NaN is larger."""
    value: np.dtype[Any]
    """What numpy can read; for BF16 the format of which it is the upper half."""

    @property
    def magnitude(self) -> int:
        """All bits but the sign."""
        return int(np.iinfo(self.bits).max) >> 1

    def to_float(self, bits: int) -> float:
        """The value of a finite magnitude."""
        raw = bits.to_bytes(self.bits.itemsize, "little").rjust(self.value.itemsize, b"\0")
        return float(np.frombuffer(raw, self.value)[0])


_FLOATS = {
    "F16": _Float(np.dtype("<u2"), 0x7C00, np.dtype("<f2")),
    "BF16": _Float(np.dtype("<u2"), 0x7F80, np.dtype("<f4")),
    "F32": _Float(np.dtype("<u4"), 0x7F80_0000, np.dtype("<f4")),
    "F64": _Float(np.dtype("<u8"), 0x7FF0_0000_0000_0000, np.dtype("<f8")),
}
_INTEGERS = frozenset({"I8", "I16", "I32", "I64"})


@dataclass(frozen=True)
class _Range:
    """Part of one tensor: whole blocks, read by one thread."""

    index: int
    """Index of the tensor in the inventory."""
    tensor: Tensor
    path: Path
    start: int
    """Index of the first weight, counted through the tensor."""
    stop: int

    @property
    def n_bytes(self) -> int:
        return levels.TYPE_TRAITS[self.tensor.type].bytes_of(self.stop - self.start)


def scan(
    inventory: Inventory, on_progress: Callable[[int, int], None] | None = None, threads: int = 1
) -> tuple[Magnitudes, ...]:
    """Look at all the data once; one entry per tensor, in the inventory's order.

    Quantized types are decoded (gguf-py's `dequantize`): NaN and infinities sit in the scales of their blocks. Takes a
    few MiB of memory per thread, whatever the file's size.

    Args:
        inventory: The model.
        on_progress: Told (bytes done, bytes in all), from the calling thread.
        threads: Ranges of tensors that are looked at side by side.

    Raises:
        InputError: a file cannot be read, or became shorter than its header says while it was read.
    """
    sizes = [_file_bytes(path) for path in inventory.shards]
    found = [Magnitudes(t.name, not_checked=_why_not(t, sizes[t.shard])) for t in inventory.tensors]
    ranges = [
        _Range(index, tensor, inventory.shards[tensor.shard], start, min(start + _RANGE_WEIGHTS, tensor.n_weights))
        for index, tensor in enumerate(inventory.tensors)
        if found[index].checked
        for start in range(0, tensor.n_weights, _RANGE_WEIGHTS)
    ]
    done, total = 0, sum(part.n_bytes for part in ranges)
    with ThreadPoolExecutor(threads) as pool:
        for part, seen in zip(ranges, pool.map(_look_at, ranges), strict=True):
            found[part.index] = _joined(found[part.index], seen)
            done += part.n_bytes
            if on_progress:
                on_progress(done, total)
    return tuple(found)


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read {show(path)}: {reason_of(error)}") from error


def _why_not(tensor: Tensor, file_bytes: int) -> str:
    """Why the tensor's data cannot be looked at; empty when it can."""
    if tensor.n_bytes is None:
        return "its size is unknown"
    if tensor.offset + tensor.n_bytes > file_bytes:
        return "the file ends before it does"
    if tensor.type in _INTEGERS:
        return "it holds integers"
    if tensor.type not in _FLOATS and not _can_decode(tensor.type_id):
        return f"gguf-py cannot decode {tensor.type}"
    return ""


@cache
def _can_decode(type_id: int) -> bool:
    try:
        _decode(np.zeros(levels.TYPES_BY_ID[type_id].block_bytes, np.uint8), type_id)
    except (NotImplementedError, ValueError):  # ValueError: an id that this gguf-py does not have
        return False
    return True


def _decode(raw: npt.NDArray[np.uint8], type_id: int) -> npt.NDArray[np.float32]:
    """Blocks of a quantized type to their weights."""
    with np.errstate(all="ignore"):  # NaN and infinity are what we look for
        weights: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type_id))
    return weights


def _look_at(part: _Range) -> Magnitudes:
    """One range, a piece at a time."""
    traits, kind = levels.TYPE_TRAITS[part.tensor.type], _FLOATS.get(part.tensor.type)
    step = _PIECE_BYTES // kind.bits.itemsize if kind else _PIECE_WEIGHTS
    found = Magnitudes(part.tensor.name)
    try:
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.tensor.offset + traits.bytes_of(part.start))
            buffer = np.empty(min(part.n_bytes, traits.bytes_of(step)), np.uint8)
            for start in range(part.start, part.stop, step):
                raw = buffer[: traits.bytes_of(min(step, part.stop - start))]
                _fill(raw, file, part.path)
                if kind:
                    piece = _measured(part.tensor.name, raw.view(kind.bits), kind, start)
                else:
                    weights = _decode(raw, part.tensor.type_id).ravel()
                    piece = _measured(part.tensor.name, weights.view(np.uint32), _FLOATS["F32"], start)
                found = _joined(found, piece)
    except OSError as error:
        raise InputError(f"cannot read {show(part.path)}: {reason_of(error)}") from error
    return found


def _fill(raw: npt.NDArray[np.uint8], file: FileIO, path: Path) -> None:
    """Read exactly as many bytes as the buffer has."""
    view = raw.data
    while view:
        n_bytes = file.readinto(view)
        if not n_bytes:
            raise InputError(f"{show(path)} became shorter while it was read", "do not write to it during the scan")
        view = view[n_bytes:]


def _measured(tensor: str, bits: npt.NDArray[Any], kind: _Float, start: int) -> Magnitudes:
    """A piece's values, given as bits [weights], which it may overwrite; `start` is the index of the first one."""
    bits &= bits.dtype.type(kind.magnitude)
    largest = int(bits.max(initial=0))
    if largest < kind.infinity:
        return Magnitudes(tensor, kind.to_float(largest))
    bad = bits >= kind.infinity
    n_nan = int(np.count_nonzero(bits > kind.infinity))
    return Magnitudes(
        tensor,
        absmax=kind.to_float(int(bits.max(where=~bad, initial=0))),
        n_nan=n_nan,
        n_inf=int(np.count_nonzero(bad)) - n_nan,
        first_bad=start + int(bad.argmax()),
    )


def _joined(before: Magnitudes, after: Magnitudes) -> Magnitudes:
    """Two parts of one tensor, in order."""
    return replace(
        before,
        absmax=max(before.absmax, after.absmax),
        n_nan=before.n_nan + after.n_nan,
        n_inf=before.n_inf + after.n_inf,
        first_bad=after.first_bad if before.first_bad is None else before.first_bad,
    )
