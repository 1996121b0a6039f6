"""Importance matrices: how large the inputs of each column of a matrix are, as llama.cpp's quantizer takes them.

Two formats, both written by llama-imatrix. GGUF: tensors `<weight>.in_sum2` (sums of squared inputs) and
`<weight>.counts` (how many inputs, per matrix), and three keys. The older .dat, numbers little-endian:

    entry count i32
    entries: name length i32, name | calls i32 | value count i32 | values f32 each (means times calls)
    optional: chunk count i32 | dataset length i32, dataset
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import numpy.typing as npt

from qres.arrays import Floats
from qres.errors import InputError, QresError, UsageError, reason_of
from qres.files import protect, whole_file
from qres.gguf.format.cursor import CorruptError, Cursor, corrupt
from qres.gguf.format.header import ForeignFormatError, Header, read_header
from qres.gguf.format.metadata import Digest, array_elements
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.printable import show

SUMS, COUNTS = ".in_sum2", ".counts"
_GIVE = "give the file that llama-imatrix, or --make-imatrix, wrote for this model"
_MAX_NAME = 256
"""Bytes of an entry's name; ggml's own limit is 64."""
_MAX_DATASETS = 16
_MAX_BYTES = 2**32
"""The largest file that is read into memory. A model of 10**12 weights in 384 experts takes 1.5 * 10**9."""
_NO_INPUTS = frozenset({"token_embd.weight", "per_layer_token_embd.weight"})
"""Tables that no matmul reads: llama.cpp makes them without an importance matrix where an entry does not fit."""


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix. Arrays have a row per count: one per expert, or one for all that a tensor holds."""

    path: Path
    entries: Mapping[str, Floats]
    """Tensor -> mean squared input [counts, columns]; 1 where nothing was counted, as for llama-quantize."""
    sums: Mapping[str, Floats]
    """The sums that the means are made from; of a .dat the means times the calls."""
    counts: Mapping[str, Floats]
    """[counts]: what each row's sums are to be divided by."""
    datasets: tuple[str, ...]
    chunks: int
    """Chunks of text it was computed on; 0 when the file does not say, as below."""
    chunk_size: int
    """Tokens in each chunk that the matrix was computed on."""

    @property
    def digest(self) -> str:
        """SHA-256 of the entries: what is quantized with equal ones is equal."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name}\0{entry.shape}\0".encode())
            digest.update(entry.astype("<f4").tobytes())
        return digest.hexdigest()

    def importance(self, tensor: Tensor) -> Floats | None:
        """What the quantizer takes for the tensor.

        Returns:
            float32 [matrices, columns]: a row for each matrix of the tensor; None where it is quantized without.
        """
        entry = self.entries.get(tensor.name)
        if entry is None or entry.size != _matrices(tensor) * tensor.row:
            return None
        return entry.reshape(_matrices(tensor), tensor.row)

    def for_model(self, reference: Inventory) -> dict[str, Floats]:
        """`importance` of each tensor of the model that has one."""
        found = {tensor.name: self.importance(tensor) for tensor in reference.tensors}
        return {name: importance for name, importance in found.items() if importance is not None}

    def check(self, reference: Inventory) -> tuple[str, ...]:
        """Compare with the model that is to be quantized.

        Returns:
            Matrices of its blocks without an entry: llama.cpp quantizes them as if there were no importance matrix,
            and refuses types that need one.

        Raises:
            InputError: an entry is for a tensor that the model does not have, or for one of another size.
        """
        tensors = {tensor.name: tensor for tensor in reference.tensors}
        for name, entry in self.entries.items():
            tensor = tensors.get(name)
            if tensor is None:
                what = f"it has an entry for {show(name)}, which {show(reference.path.name)} does not have"
            elif name not in _NO_INPUTS and entry.size != _matrices(tensor) * tensor.row:
                rows = f"rows of {tensor.row}" + (f" in {n} matrices" if (n := _matrices(tensor)) > 1 else "")
                what = f"its entry for {show(name)} has {entry.size} values, {show(reference.path.name)} has {rows}"
            else:
                continue
            raise InputError(f"{show(self.path)} was computed from another model: {what}", _GIVE)
        return tuple(
            tensor.name
            for tensor in reference.tensors
            if tensor.n_dims > 1 and tensor.name.startswith("blk.") and tensor.name.endswith(".weight")
            if tensor.name not in self.entries
        )


def _matrices(tensor: Tensor) -> int:
    return tensor.shape[2] if len(tensor.shape) > 2 else 1


# -- reading


def read(path: Path) -> Imatrix:
    """An importance matrix in either format.

    Raises:
        InputError: the file is missing, unreadable, damaged or no importance matrix.
        UnsupportedError: a GGUF version or byte order that llama.cpp does not read.
    """
    try:
        header = read_header(path)
    except ForeignFormatError as foreign:
        return _read_dat(path, foreign)
    if not _is_imatrix(header):
        architecture = header.metadata.get("general.architecture")
        what = f"a model ({show(architecture)}), not an importance matrix" if architecture else "no importance matrix"
        raise InputError(f"{show(path)} is {what}", _GIVE)
    _require_size(path, header.file_bytes)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = {name[: -len(suffix)] for name in tensors for suffix in (SUMS, COUNTS) if name.endswith(suffix)}
    sums, counts = {}, {}
    for name in sorted(names):
        sums[name], counts[name] = (_values(path, tensors, name, suffix) for suffix in (SUMS, COUNTS))
    return _imatrix(
        path,
        sums,
        {name: np.floor(count + np.float32(0.5)) for name, count in counts.items()},  # whole, as llama.cpp reads them
        _datasets(path, header.metadata.get("imatrix.datasets")),
        *(_number(header.metadata.get(f"imatrix.{key}")) for key in ("chunk_count", "chunk_size")),
    )


def _require_size(path: Path, file_bytes: int) -> None:
    if file_bytes > _MAX_BYTES:
        message = f"{show(path)} has {file_bytes / 2**30:,.1f} GiB, too many for an importance matrix"
        raise InputError(message, _GIVE)


def _is_imatrix(header: Header) -> bool:
    """llama.cpp does not ask for the type, and old files may not have it."""
    names = (tensor.name for tensor in header.tensors)
    return header.metadata.get("general.type") == "imatrix" or any(name.endswith(SUMS) for name in names)


def _values(path: Path, tensors: Mapping[str, Tensor], name: str, suffix: str) -> Floats:
    """The data of one tensor, flat; the header was checked against the file's size."""
    tensor = tensors.get(name + suffix)
    if tensor is None or tensor.type != "F32" or not tensor.n_weights:
        what = "is missing" if tensor is None else f"is {tensor.type}, not F32" if tensor.n_weights else "is empty"
        raise corrupt(f"{show(name + suffix)} {what}").problem.exception(path)
    try:
        values = np.fromfile(path, "<f4", tensor.n_weights, offset=tensor.offset)
    except OSError as error:
        raise InputError(f"cannot read {show(path)}: {reason_of(error)}", "check the path") from error
    if values.size < tensor.n_weights:
        raise InputError(f"{show(path)} became shorter while it was read", "do not write to it during the scan")
    return values.astype(np.float32, copy=False)


def _datasets(path: Path, value: object) -> tuple[str, ...]:
    if not isinstance(value, Digest) or value.element_type != "string" or value.length > _MAX_DATASETS:
        return ()
    with suppress(OSError):
        return tuple(element.decode(errors="replace") for element in array_elements(path, value))
    return ()


def _number(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _imatrix(
    path: Path,
    sums: Mapping[str, Floats],
    counts: Mapping[str, Floats],
    datasets: Sequence[str],
    chunks: int,
    chunk_size: int,
) -> Imatrix:
    """Sums and counts to what the quantizer takes.

    Raises:
        InputError: there are none, or numbers that cannot be.
    """
    if not sums:
        raise InputError(f"{show(path)} is an importance matrix without entries", _GIVE)
    rows, entries = {}, {}
    for name, flat in sums.items():
        count = counts[name]
        for what, values in (("sums of squares", flat), ("counts", count)):
            bad = ~(np.isfinite(values) & (values >= 0))
            if bad.any():
                kind = "negative" if np.isfinite(values[bad][0]) else "not finite"
                message = f"{show(path)} is damaged: the {what} of {show(name)} hold values that are {kind}"
                raise InputError(message, "compute the importance matrix again")
        if flat.size % count.size:
            raise corrupt(f"{show(name)} has {flat.size} sums for {count.size} counts").problem.exception(path)
        rows[name] = flat.reshape(count.size, -1)
        counted = count[:, None] > 0
        entries[name] = np.where(counted, rows[name] / np.where(counted, count[:, None], 1), np.float32(1))
    return Imatrix(path, entries, rows, dict(counts), tuple(datasets), chunks, chunk_size)


def _read_dat(path: Path, foreign: ForeignFormatError) -> Imatrix:
    """The older format, which starts with nothing to know it by; `foreign` is what the file is when it is not that."""
    sums: dict[str, Floats] = {}
    counts: dict[str, Floats] = {}
    datasets: list[str] = []
    try:
        with path.open("rb", buffering=1 << 20) as file:
            cursor = Cursor(file, os.fstat(file.fileno()).st_size)
            if not _looks_like_dat(file):
                raise InputError(f"{foreign.message}; nor is it a .dat importance matrix", _GIVE)
            _require_size(path, cursor.size)
            count = cursor.number("<i")
            cursor.check_count(count, 17, "entries")
            for number in range(count):
                cursor.where = f"entry {number + 1}"
                _read_entry(cursor, sums, counts)
            chunks = 0
            if cursor.left:
                cursor.where = "the end"
                chunks = cursor.number("<i")
                length = cursor.number("<i") if cursor.left else 0
                if length > 0:
                    datasets.append(cursor.take(length).decode(errors="replace"))
    except CorruptError as error:
        raise error.problem.exception(path) from None
    except OSError as error:
        raise InputError(f"cannot read {show(path)}: {reason_of(error)}", "check the path") from error
    return _imatrix(path, sums, counts, datasets, max(chunks, 0), 0)


def _looks_like_dat(file: BinaryIO) -> bool:
    """There is at least one entry, and the first has a name."""
    head = file.read(8 + _MAX_NAME)
    file.seek(0)
    length = int.from_bytes(head[4:8], "little", signed=True)
    return int.from_bytes(head[:4], "little", signed=True) > 0 and bool(_name(head[8 : 8 + max(length, 0)], length))


def _name(raw: bytes, length: int) -> str:
    """The name in these bytes; empty for what cannot be one."""
    name = raw.decode(errors="replace")
    return (
        name
        if 0 < length == len(raw) <= _MAX_NAME and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name
        else ""
    )


def _read_entry(cursor: Cursor, sums: dict[str, Floats], counts: dict[str, Floats]) -> None:
    length = cursor.number("<i")
    name = _name(cursor.take(length), length) if 0 < length <= _MAX_NAME else ""
    if not name:
        raise corrupt(f"{cursor.where} has no name that can be read")
    calls, n_values = cursor.number("<i"), cursor.number("<i")
    if n_values < 1:
        raise corrupt(f"{cursor.where} claims {n_values} values")
    sums[name] = np.frombuffer(cursor.take(4 * n_values), "<f4").astype(np.float32)
    counts[name] = np.array([max(calls, 1)], np.float32)  # none: the values are means already


# -- writing


def require_writable(path: Path, inputs: Sequence[Path]) -> None:
    """Refuse a place for an importance matrix before any work is done; nothing is made there yet.

    Args:
        path: Where it is to be written.
        inputs: Files that are read, whatever name or link leads to them.

    Raises:
        UsageError: a name that does not end in .gguf.
        InputError: it cannot be written there, or would overwrite an input or what is no importance matrix.
    """
    if path.suffix != ".gguf" or not path.stem:
        raise UsageError(f"--make-imatrix {show(path)}: the file is a GGUF", "name it so, such as imatrix.gguf")
    other = "choose another place with --make-imatrix"
    try:
        protect([path], inputs, other)
        if path.exists():
            if not path.is_file():
                raise InputError(f"{show(path)} exists and is not a file", other)
            if not _may_be_replaced(path):
                raise InputError(f"{show(path)} exists and is not an importance matrix", other)
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        mode = folder.stat().st_mode
    except OSError as error:
        raise InputError(f"cannot write {show(path)}: {reason_of(error)}", other) from error
    if not stat.S_ISDIR(mode) or not os.access(folder, os.W_OK | os.X_OK):
        reason = "cannot be written" if stat.S_ISDIR(mode) else "is not a folder"
        raise InputError(f"cannot write {show(path)}: {show(folder)} {reason}", other)


def _may_be_replaced(path: Path) -> bool:
    with suppress(QresError):
        return _is_imatrix(read_header(path, tolerant=True))
    return False


class _Writer(gguf.GGUFWriter):
    """Writes a GGUF without an architecture, as llama-imatrix does."""

    def add_architecture(self) -> None:
        """Does nothing: gguf-py would write the architecture here."""


def write(
    path: Path,
    sums: Mapping[str, npt.NDArray[np.floating]],
    counts: Mapping[str, npt.NDArray[np.generic]],
    *,
    dataset: str,
    chunks: int,
    chunk_size: int,
) -> None:
    """Write an importance matrix as llama-imatrix does, whole or not at all.

    Args:
        path: File to write; folders that it needs are made.
        sums: Tensor -> sums of squared inputs [matrices, columns].
        counts: Tensor -> inputs that were summed, [matrices] or one for all of them.
        dataset: What the text was.
        chunks: Chunks of text.
        chunk_size: Tokens per chunk.

    Raises:
        InputError: the file cannot be written, or sums are not finite.
        ValueError: sums and counts that do not go together.
    """
    if sums.keys() != counts.keys():
        raise ValueError("sums and counts are of different tensors")
    writer = _Writer(None, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [dataset])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", chunk_size)
    for name in sorted(sums):
        squares, count = (np.ascontiguousarray(one[name], np.float32) for one in (sums, counts))
        if squares.ndim != 2 or count.ndim != 1 or count.size not in (1, len(squares)):
            raise ValueError(f"{name}: sums of shape {squares.shape} with counts of shape {count.shape}")
        if not np.isfinite(squares).all():
            raise InputError(f"the inputs of {show(name)} are not finite", "no importance matrix can be made of them")
        writer.add_tensor(
            name + SUMS, squares.reshape(count.size, -1)
        )  # a count per row, or llama.cpp reads it wrongly
        writer.add_tensor(name + COUNTS, count[:, None])
    try:
        target = path.resolve()  # a link stays a link, and what it leads to is replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as partial:
            try:
                writer.write_header_to_file(partial)
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
            finally:
                writer.close()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        instead = "choose another place with --make-imatrix"
        raise InputError(f"cannot write {show(path)}: {reason_of(error)}", instead) from error
