"""Rows of a GGUF's tensor table to tensors with sizes and places, checked against their types and the file's size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qres import levels
from qres.gguf.format.cursor import Problem, corrupt
from qres.printable import show

_MAX_SIZE = 2**63 - 1  # llama.cpp counts weights and bytes in an int64
_MAX_NAME = 63  # bytes: GGML_MAX_NAME counts the zero behind it
_BUFFER_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml-backend.cpp: a buffer that starts elsewhere aborts
_WRITE_AGAIN = "convert the original model again, or write the file again with gguf-py"


@dataclass(frozen=True)
class Tensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """`ne` in ggml order: the row length first."""
    type: str
    """ggml type name, or `type N` for one that this version does not know."""
    type_id: int
    n_weights: int
    """0 for an impossible shape."""
    n_bytes: int | None
    """None for a type of unknown layout, or a shape that the type cannot have."""
    offset: int
    """Where the first byte is, from the start of its file."""
    shard: int = 0
    """Index of its file in `Inventory.shards`."""

    @property
    def row(self) -> int:
        """Weights per row: what a block must divide."""
        return self.shape[0] if self.shape else 1

    @property
    def n_dims(self) -> int:
        """Dimensions without trailing ones, as ggml_n_dims: a vector stored as [n, 1] has one."""
        return max((i + 1 for i, length in enumerate(self.shape) if length > 1), default=1)

    @property
    def end(self) -> int:
        """One past the tensor's last byte, from the start of its file; `offset` where the size is not known."""
        return self.offset + (self.n_bytes or 0)


@dataclass(frozen=True)
class TableRow:
    """What the table says of one tensor."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    """Bytes from the start of the tensor data, which begins behind the header."""

    @property
    def is_possible(self) -> bool:
        """Weights and bytes can be counted; zeros left out: [0, 2**62, 2**62] overflows llama.cpp's product, too."""
        traits = levels.TYPES_BY_ID.get(self.type_id)
        size = math.prod(length or 1 for length in self.shape)
        return size <= _MAX_SIZE and (traits is None or traits.bytes_of(size) <= _MAX_SIZE)

    def tensor(self, data: int, shard: int) -> Tensor:
        """The tensor in the file of index `shard`, whose data starts at byte `data`."""
        traits = levels.TYPES_BY_ID.get(self.type_id)
        n_weights = math.prod(self.shape) if self.is_possible else 0
        n_bytes = None
        if traits and self.is_possible and (self.shape[0] if self.shape else 1) % traits.block_size == 0:
            n_bytes = traits.bytes_of(n_weights)
        name = levels.type_name(self.type_id)
        return Tensor(self.name, self.shape, name, self.type_id, n_weights, n_bytes, data + self.offset, shard)


def layout_problems(tensors: Sequence[Tensor], file_bytes: int, data: int, alignment: int) -> Iterator[Problem]:
    """What is wrong with sizes and places, and what llama.cpp refuses in a file that is whole (docs/facts.md, 38).

    Args:
        tensors: In the order of the table.
        file_bytes: Size of the file.
        data: Byte that the tensor data starts at.
        alignment: Of the tensors within it, in bytes.
    """
    torn = [t for t in tensors if t.n_bytes is None and t.row % _block_size(t)]
    if torn:
        what = f"rows of {torn[0].row}, not a multiple of {torn[0].type}'s block of {_block_size(torn[0])}"
        yield corrupt(f"tensor {show(torn[0].name)!r} has {what}{_more(torn, 'such tensors')}").problem
    beyond = [t for t in tensors if t.end > file_bytes]
    if beyond:
        what = f"tensor {show(beyond[0].name)!r} ends at byte {beyond[0].end}, the file has {file_bytes}"
        last = f"tensors beyond it, the last up to byte {max(t.end for t in beyond)}"
        yield Problem(f"truncated: {what}{_more(beyond, last)}")
        return
    yield from _names_too_long(tensors)
    yield from _misplaced(tensors, data, alignment)


def _unloadable(message: str) -> Problem:
    return Problem(message, _WRITE_AGAIN, fatal=False, unloadable=True)


def _names_too_long(tensors: Sequence[Tensor]) -> Iterator[Problem]:
    long = [t for t in tensors if len(t.name.encode()) > _MAX_NAME]
    if long:
        what = f"tensor {show(long[0].name)!r} has a name of {len(long[0].name.encode())} bytes, llama.cpp takes"
        yield _unloadable(f"not loadable: {what} {_MAX_NAME}{_more(long, 'such names')}")


def _misplaced(tensors: Sequence[Tensor], data: int, alignment: int) -> Iterator[Problem]:
    """Tensors follow each other without a gap, in the order of the table, and the first one is aligned for the CPU."""
    expected = data
    for tensor in tensors:
        traits = levels.TYPES_BY_ID.get(tensor.type_id)
        if traits is None or traits.removed or tensor.n_bytes is None:
            return  # where the next one starts is not known
        if tensor.offset != expected:
            what = f"tensor {show(tensor.name)!r} is at byte {tensor.offset}, llama.cpp expects it at {expected}"
            yield _unloadable(f"not loadable: {what}, right behind the one before")
            return
        expected += -(-tensor.n_bytes // alignment) * alignment
    if tensors and data % _BUFFER_ALIGNMENT:
        what = f"the tensor data starts at byte {data}, not at a multiple of {_BUFFER_ALIGNMENT}"
        yield _unloadable(f"not loadable: {what} (general.alignment is {alignment})")


def _block_size(tensor: Tensor) -> int:
    traits = levels.TYPES_BY_ID.get(tensor.type_id)
    return traits.block_size if traits else 1


def _more(tensors: Sequence[Tensor], what: str) -> str:
    return f"; {len(tensors) - 1} more {what}" if len(tensors) > 1 else ""
