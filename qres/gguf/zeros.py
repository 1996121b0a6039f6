"""Files that end in zeros: a download that made room for the whole file and did not fill it."""

from __future__ import annotations

from qres.errors import InputError, reason_of
from qres.gguf.format.cursor import DOWNLOAD_AGAIN
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.printable import counted, show

_PIECE = 1 << 20  # bytes read at a time
_FEW = 2
"""Matrices from which on zeros at the end are no accident: biases may be zero, and a single matrix that is unused."""


def require_filled(inventory: Inventory) -> None:
    """Refuse a file whose last tensors hold nothing but zeros. Of a sound file a few bytes are read.

    Raises:
        InputError: the file was not downloaded or copied to its end, or cannot be read.
    """
    empty = zeros_at_the_end(inventory)
    if sum(tensor.n_dims > 1 for tensor in empty) >= _FEW:
        raise InputError(
            f"{show(inventory.path)} is unfinished: its last {counted(len(empty), 'tensor')} hold only zeros, from "
            f"{show(empty[0].name)} on",
            DOWNLOAD_AGAIN,
        )


def zeros_at_the_end(inventory: Inventory) -> list[Tensor]:
    """The tensors at the end of the first file that ends so whose bytes are all zero, in the order of the file.

    Raises:
        InputError: a file cannot be read.
    """
    for shard, path in enumerate(inventory.shards):
        own = sorted((t for t in inventory.tensors if t.shard == shard and t.n_bytes), key=lambda t: t.offset)
        empty: list[Tensor] = []
        try:
            with path.open("rb", buffering=0) as file:
                for tensor in reversed(own):
                    file.seek(tensor.offset)
                    left, is_zero = tensor.n_bytes or 0, True
                    while left and is_zero:
                        data = file.read(min(left, _PIECE))
                        is_zero = bool(data) and not data.strip(b"\0")
                        left -= len(data)
                    if not is_zero:
                        break
                    empty.append(tensor)
        except OSError as error:
            raise InputError(f"cannot read {show(path)}: {reason_of(error)}", "check the path") from error
        if empty:
            return empty[::-1]
    return []
