"""A copy of a model's file with its weights in other tensors: one is cut into several, as they are in another file.

For layouts that llama.cpp does not take for an architecture. Rows are copied byte by byte, so that the copy holds the
same weights exactly; metadata is copied as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from qres.errors import InputError, UnsupportedError, reason_of
from qres.files import whole_file
from qres.gguf.format.header import read_header
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.gguf.pairing import cuts
from qres.levels import TYPE_TRAITS
from qres.printable import show

_BY_ROWS = ("attn_qkv", "ffn_gate_up_exps")
"""Tensors whose rows are those of their parts, one after the other in each matrix."""
_COPIED = 1 << 22
"""Bytes copied at a time."""


@dataclass(frozen=True)
class _Piece:
    """One tensor of the copy: some rows of every matrix of a tensor of the source."""

    name: str
    shape: tuple[int, ...]
    source: Tensor
    first: int
    """Row within each matrix."""

    @property
    def n_bytes(self) -> int:
        return TYPE_TRAITS[self.source.type].bytes_of(int(np.prod(self.shape)))


def can_cut(inventory: Inventory, other: Inventory) -> bool:
    """Whether a file holds in one tensor what the other one holds in several, by whole rows."""
    return any(len(one) > 1 for one in _plan(inventory, other)) and len(inventory.shards) == 1


def write_cut(inventory: Inventory, other: Inventory, target: Path) -> None:
    """Write a copy of a file with its tensors cut as those of another file are.

    Args:
        inventory: A file of one shard.
        other: The file whose tensors have the names and shapes that are wanted.
        target: Where to write it; its folder is made.

    Raises:
        InputError: the file cannot be read, or the copy cannot be written.
        UnsupportedError: a tensor of a type whose layout is not known.
    """
    pieces = [piece for group in _plan(inventory, other) for piece in group]
    odd = next((piece.source for piece in pieces if piece.source.type not in TYPE_TRAITS), None)
    if odd is not None:
        raise UnsupportedError(f"{show(odd.name)} is of {odd.type}, which cannot be cut", "convert the model again")
    header = read_header(inventory.path)
    alignment = header.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as partial, inventory.path.open("rb") as source, partial.open("wb") as out:
            source.seek(16)
            out.write(struct.pack("<4sIQ", b"GGUF", header.version, len(pieces)))
            out.write(source.read(header.table_at - 16))
            _write_table(out, pieces, alignment)
            for piece in pieces:
                out.write(bytes(-out.tell() % alignment))
                _copy(source, out, piece)
    except OSError as error:
        raise InputError(
            f"cannot write {show(target)}: {reason_of(error)}", "choose another folder with --cache"
        ) from error


def _plan(inventory: Inventory, other: Inventory) -> list[list[_Piece]]:
    """For each tensor, in the order of the file, what becomes of it."""
    shapes = {tensor.name: tensor.shape for tensor in other.tensors}
    own = {tensor.name for tensor in inventory.tensors}
    parts_of: dict[str, tuple[str, ...]] = {}
    for whole, parts in cuts(tuple(own)):
        stem = whole.rpartition(".")[0].rpartition(".")[2]
        if whole in own and stem in _BY_ROWS and whole not in shapes and all(part in shapes for part in parts):
            parts_of[whole] = parts
    return [_pieces(tensor, parts_of.get(tensor.name, ()), shapes) for tensor in inventory.tensors]


def _pieces(tensor: Tensor, parts: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[_Piece]:
    if not parts:
        return [_Piece(tensor.name, tensor.shape, tensor, 0)]
    out, first = [], 0
    for part in parts:
        rows = shapes[part][1] if len(shapes[part]) > 1 else shapes[part][0]
        shape = (tensor.shape[0], rows, *tensor.shape[2:]) if tensor.n_dims > 1 else (rows,)
        out.append(_Piece(part, shape, tensor, first))
        first += rows
    return out


def _write_table(out: BinaryIO, pieces: Sequence[_Piece], alignment: int) -> None:
    at = 0
    for piece in pieces:
        name = piece.name.encode()
        out.write(struct.pack("<Q", len(name)) + name)
        shape = struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *piece.shape)
        out.write(shape + struct.pack("<IQ", piece.source.type_id, at))
        at += -(-piece.n_bytes // alignment) * alignment


def _copy(source: BinaryIO, out: BinaryIO, piece: _Piece) -> None:
    """The piece's rows of every matrix; a bias is one matrix of one-weight rows."""
    tensor, whole = piece.source, piece.shape == piece.source.shape
    row = TYPE_TRAITS[tensor.type].bytes_of(tensor.shape[0] if tensor.n_dims > 1 else 1)
    rows, own = (shape[1] if len(shape) > 1 else shape[0] for shape in (tensor.shape, piece.shape))
    matrices = 1 if whole else int(np.prod(piece.shape[2:]))
    for matrix in range(matrices):
        source.seek(tensor.offset + (matrix * rows + piece.first) * row)
        left = piece.n_bytes // matrices
        assert whole or left == own * row
        while left:
            data = source.read(min(left, _COPIED))
            if not data:
                raise OSError("the file became shorter while it was read")
            out.write(data)
            left -= len(data)
