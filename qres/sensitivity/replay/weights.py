"""Weights of a GGUF for torch: rows become floats when they are used, the file stays mapped, nothing is kept."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qres.errors import InputError, reason_of
from qres.gguf.inventory import Inventory
from qres.levels import TYPE_TRAITS
from qres.native.blocks import dequantize

BLOCK_WEIGHTS = 1 << 22
"""Weights that are floats at a time: 16 MiB, however large the matrix is."""

_TORCH: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    """The tensors of a model's files."""

    def __init__(self, inventory: Inventory, device: torch.device, threads: int) -> None:
        """Map the files.

        Args:
            inventory: The model.
            device: Where rows go.
            threads: For quantized rows.

        Raises:
            InputError: a file cannot be mapped.
        """
        self.device = device
        self._threads = threads
        self._entries = {entry.name: entry for entry in inventory.tensors}
        self._maps = [_mapped(path) for path in inventory.shards]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the file."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, int, int]:
        """Matrices, rows of each, weights per row: a tensor of the file as a stack of matrices."""
        ne = (*self._entries[name].shape, 1, 1, 1, 1)
        return ne[2] * ne[3], ne[1], ne[0]

    def type(self, name: str) -> str:
        """The ggml type that the file holds the tensor in, such as `F16`."""
        return self._entries[name].type

    def rows(self, name: str, start: int, stop: int, matrix: int = 0) -> Tensor:
        """Rows start to stop of one matrix as float32 [stop - start, weights per row], on the device."""
        return self._floats(name, self._raw(name, start, stop, matrix))

    def picked(self, name: str, ids: Tensor) -> Tensor:
        """The rows of the first matrix with these numbers [n], as float32 [n, weights per row], on the device."""
        _, height, _ = self.shape(name)
        return self._floats(name, self._raw(name, 0, height, 0)[ids.cpu().numpy()])

    def whole(self, name: str) -> Tensor:
        """All weights in file order, float32 [n_weights], on the device: for vectors and other small tensors."""
        matrices, height, _ = self.shape(name)
        return torch.cat([self.rows(name, 0, height, i) for i in range(matrices)]).reshape(-1)

    def _floats(self, name: str, raw: npt.NDArray[np.uint8]) -> Tensor:
        """Bytes of rows [rows, bytes per row] as float32 [rows, weights per row], on the device."""
        _, _, row = self.shape(name)
        kind = _TORCH.get(self.type(name))
        if kind is None:
            return torch.from_numpy(dequantize(raw, self.type(name), row, self._threads)).to(self.device)
        flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1))
        return flat.view(kind).reshape(len(raw), row).to(self.device).to(torch.float32)

    def _raw(self, name: str, start: int, stop: int, matrix: int) -> npt.NDArray[np.uint8]:
        """Bytes of rows [stop - start, bytes per row], a view of the file."""
        entry = self._entries[name]
        _, height, row = self.shape(name)
        per_row = TYPE_TRAITS[entry.type].bytes_of(row)
        first = entry.offset + (matrix * height + start) * per_row
        flat = self._maps[entry.shard][first : first + (stop - start) * per_row]
        return flat.reshape(stop - start, per_row)


def blocks(height: int, row: int) -> list[tuple[int, int]]:
    """Ranges of rows with at most BLOCK_WEIGHTS weights each."""
    step = max(1, BLOCK_WEIGHTS // max(row, 1))
    return [(start, min(start + step, height)) for start in range(0, height, step)]


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            # A private map may be written to, which spares torch's warning; no page of it ever is.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from error
    return np.frombuffer(data, np.uint8)
