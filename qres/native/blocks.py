"""Rows of weights to quantized blocks and back, by ggml's own code: what the weights become at a type.

ctypes releases the interpreter's lock during a call, so ranges of rows run in threads. Everything that ggml would abort
on, or make nonsense of, is refused before it is called: values that are not finite, rows that hold no whole blocks, a
missing importance matrix, a type that cannot be made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qres.errors import NativeError
from qres.native.ggml import declare

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_ABORTING = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})
"""Types that ggml aborts on when the squares it sums overflow (docs/facts.md, 31), and what it can sum without:"""
_MAX_WEIGHT = 2.0**17
_MAX_IMPORTANCE = 2.0**50
"""Limit of importance times the square of the largest weight: the squares of its sums stay below 2**128."""

_PIECE_WEIGHTS = 1 << 16
"""What one thread takes at a time: its float32 copy and its blocks stay in a second-level cache."""
_N_TYPES = 43  # GGML_TYPE_COUNT
_F32 = 0


class _CTraits(ctypes.Structure):
    """`struct ggml_type_traits` of ggml.h, as vendored by llama-cpp-python 0.3.36."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


# void to_float(const void * x, float * y, int64_t k);
_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
# const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type);
_type_traits = declare("ggml_get_type_traits", ctypes.POINTER(_CTraits), ctypes.c_int)
# void ggml_quantize_init(enum ggml_type type);
_quantize_init = declare("ggml_quantize_init", None, ctypes.c_int)
# bool ggml_quantize_requires_imatrix(enum ggml_type type);
_requires_imatrix = declare("ggml_quantize_requires_imatrix", ctypes.c_bool, ctypes.c_int)
# size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start, int64_t nrows,
#                            int64_t n_per_row, const float * imatrix);
_quantize_chunk = declare(
    "ggml_quantize_chunk",
    ctypes.c_size_t,
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
)
# bool ggml_validate_row_data(enum ggml_type type, const void * data, size_t nbytes);
_validate = declare("ggml_validate_row_data", ctypes.c_bool, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class _Type:
    """One ggml type, as the library describes it."""

    id: int
    name: str
    block_size: int
    block_bytes: int
    to_float: Callable[[int, int, int], None] | None
    """None for a type that is not decoded: F32, integers, F64, and the types of rounded activations."""

    def row_bytes(self, n_per_row: int) -> int:
        """Bytes of one row.

        Raises:
            NativeError: rows of this length do not hold whole blocks.
        """
        if n_per_row <= 0 or n_per_row % self.block_size:
            raise NativeError(f"rows of {n_per_row} weights do not hold whole {self.name} blocks of {self.block_size}")
        return n_per_row // self.block_size * self.block_bytes


def _read_types() -> dict[str, _Type]:
    """All types, by qres's name, once the struct's fields agree with what the library's functions say."""
    type_name = declare("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    block_size = declare("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    type_size = declare("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    is_quantized = declare("ggml_is_quantized", ctypes.c_bool, ctypes.c_int)
    types = {}
    for type_id in range(_N_TYPES):
        traits = _type_traits(type_id).contents
        size = block_size(type_id)
        sound = (
            traits.type_name == type_name(type_id)
            and traits.blck_size == size
            and traits.type_size == type_size(type_id)
            and traits.is_quantized == is_quantized(type_id)
        )
        if not sound:
            raise NativeError(
                "the installed llama-cpp-python describes ggml's types differently from what qres was written for",
                "install the version range that qres names in pyproject.toml",
            )
        if traits.type_name and size:  # numbers of removed types are empty, or hold a sentence for a name
            name = traits.type_name.decode().upper()
            to_float = _TO_FLOAT(traits.to_float) if traits.to_float else None
            types[name] = _Type(type_id, name, size, traits.type_size, to_float)
    return types


_TYPES = _read_types()

MAKEABLE = tuple(name for name, kind in _TYPES.items() if kind.to_float or kind.id == _F32)
"""The cases of ggml_quantize_chunk, which has no way to ask for them and aborts on any other: types of weights. They
are those that ggml decodes to float32, and F32 itself."""


def type_id(type_name: str) -> int:
    """`enum ggml_type` of a type that can be made.

    Raises:
        NativeError: ggml makes no tensors of it.
    """
    return _makeable(type_name).id


def quantize(
    values: npt.NDArray[np.floating[Any]], type_name: str, threads: int, importance: Floats | None = None
) -> Bytes:
    """Rows to blocks, as llama.cpp's quantizer writes them.

    Args:
        values: Weights [rows, n_per_row]; what is not float32 or not contiguous is converted a range at a time.
        type_name: ggml type, e.g. `Q4_K`.
        threads: Ranges of rows done side by side; the result does not depend on it.
        importance: float32 [n_per_row], the mean squared input of each column.

    Returns:
        uint8 [rows, row_bytes].

    Raises:
        NativeError: a type that cannot be made, or not without an importance matrix; rows that hold no whole blocks;
            values that are not finite, or that the type cannot hold.
    """
    work = _Quantizer.of(values, type_name, importance)
    raw = np.empty((len(values), work.row_bytes), np.uint8)
    _in_ranges(values.shape, threads, lambda start, stop: work.run(values[start:stop], raw[start:stop]))
    return raw


def dequantize(raw: Bytes, type_name: str, n_per_row: int, threads: int, out: Floats | None = None) -> Floats:
    """Blocks to the weights that they stand for.

    Args:
        raw: uint8 [rows, row_bytes]; rows may lie apart.
        type_name: ggml type.
        n_per_row: Weights per row.
        threads: Ranges of rows done side by side.
        out: float32 [rows, n_per_row], contiguous, to write to.

    Returns:
        float32 [rows, n_per_row]: `out` where it was given.

    Raises:
        NativeError: a type that ggml does not decode, or rows of another length than the type's blocks take.
    """
    kind = _decodable(type_name)
    if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] != kind.row_bytes(n_per_row):
        raise NativeError(
            f"{raw.dtype} {raw.shape} is not {kind.row_bytes(n_per_row)} bytes for each row of {n_per_row} {kind.name}"
        )
    out = _output(out, (len(raw), n_per_row))
    _in_ranges(out.shape, threads, lambda start, stop: _decode(kind, raw[start:stop], out[start:stop]))
    return out


def round_trip(
    values: npt.NDArray[np.floating[Any]],
    type_name: str,
    threads: int,
    importance: Floats | None = None,
    out: Floats | None = None,
) -> Floats:
    """What the weights become at a type; no more blocks are held than the threads work on.

    Args:
        values: As for `quantize`.
        type_name: ggml type.
        threads: Ranges of rows done side by side.
        importance: As for `quantize`.
        out: float32 [rows, n_per_row], contiguous, to write to; may be `values`.

    Returns:
        float32 [rows, n_per_row]: `out` where it was given.

    Raises:
        NativeError: as `quantize`.
    """
    work = _Quantizer.of(values, type_name, importance)
    kind = _decodable(type_name)
    out = _output(out, values.shape)

    def run(start: int, stop: int) -> None:
        raw = np.empty((stop - start, work.row_bytes), np.uint8)
        work.run(values[start:stop], raw)
        _decode(kind, raw, out[start:stop])

    _in_ranges(values.shape, threads, run)
    return out


@dataclass(frozen=True)
class _Quantizer:
    """A type and the importance of the columns, checked."""

    kind: _Type
    row_bytes: int
    importance: Floats | None
    largest_importance: float

    @classmethod
    def of(cls, values: npt.NDArray[np.floating[Any]], type_name: str, importance: Floats | None) -> _Quantizer:
        """The quantizer of these rows.

        Raises:
            NativeError: it would abort.
        """
        kind = _makeable(type_name)
        if values.ndim != 2 or values.dtype.kind != "f":
            raise NativeError(f"{values.dtype} {values.shape} are not rows of weights")
        row_bytes = kind.row_bytes(values.shape[1])
        if importance is None:
            if _requires_imatrix(kind.id):  # llama-quantize wants one for more: `levels.LevelSpec.needs_imatrix`
                raise NativeError(f"{kind.name} needs an importance matrix")
        else:
            importance = np.ascontiguousarray(importance, np.float32)
            if importance.shape != values.shape[1:]:
                raise NativeError(f"importance of {importance.shape} for rows of {values.shape[1]} weights")
            if not (np.isfinite(importance).all() and (importance >= 0).all()):
                raise NativeError("the importance holds values that are negative or not finite")
        _quantize_init(kind.id)  # builds the tables of the IQ types; before the threads, which would wait for it
        return cls(kind, row_bytes, importance, 0.0 if importance is None else float(importance.max()))

    def run(self, values: npt.NDArray[np.floating[Any]], raw: Bytes) -> None:
        """Quantize a range of rows."""
        rows = np.ascontiguousarray(values, np.float32)
        if not np.isfinite(rows).all():
            raise NativeError(f"the weights hold values that are not finite: {self.kind.name} cannot be made of them")
        if self.kind.name in _ABORTING:
            largest = float(max(rows.max(initial=0), -rows.min(initial=0)))
            if largest > _MAX_WEIGHT or largest**2 * self.largest_importance > _MAX_IMPORTANCE:
                raise NativeError(
                    f"weights of up to {largest:.3g} are out of the range that {self.kind.name} is made of"
                )
        weights = None if self.importance is None else self.importance.ctypes.data
        _quantize_chunk(self.kind.id, rows.ctypes.data, raw.ctypes.data, 0, len(rows), rows.shape[1], weights)
        if not _validate(self.kind.id, raw.ctypes.data, raw.nbytes):  # as llama.cpp's quantizer does
            raise NativeError(f"the weights are out of the range of {self.kind.name}: its blocks are not finite")


def _decode(kind: _Type, raw: Bytes, out: Floats) -> None:
    if kind.to_float is None:
        out.view(np.uint8)[...] = raw
    elif raw.flags.c_contiguous:
        kind.to_float(raw.ctypes.data, out.ctypes.data, out.size)
    else:
        for row, weights in zip(raw, out, strict=True):
            blocks = np.ascontiguousarray(row)
            kind.to_float(blocks.ctypes.data, weights.ctypes.data, weights.size)


def _in_ranges(shape: tuple[int, ...], threads: int, run: Callable[[int, int], None]) -> None:
    """Call run(first row, one past the last) for all rows, a piece at a time."""
    rows, n_per_row = shape
    step = max(1, _PIECE_WEIGHTS // n_per_row)
    starts = range(0, rows, step)
    if threads < 2 or len(starts) < 2:
        for start in starts:
            run(start, min(start + step, rows))
        return
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        for _ in pool.map(lambda start: run(start, min(start + step, rows)), starts):
            pass


def _output(out: Floats | None, shape: tuple[int, ...]) -> Floats:
    if out is None:
        return np.empty(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise NativeError(f"{out.dtype} {out.shape} is not a contiguous float32 array of shape {shape} to write to")
    return out


def _makeable(type_name: str) -> _Type:
    if type_name not in MAKEABLE:
        raise NativeError(f"ggml makes no tensors of type {type_name}")
    return _TYPES[type_name]


def _decodable(type_name: str) -> _Type:
    if type_name not in MAKEABLE:
        raise NativeError(f"ggml does not decode {type_name}")
    return _TYPES[type_name]
