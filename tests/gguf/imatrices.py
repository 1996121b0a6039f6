"""Importance matrices as bytes, in both formats, to be read or refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from tests.gguf.building import Row, build, strings

KEYS: dict[str, object] = {
    "general.type": "imatrix",
    "imatrix.datasets": strings(["wiki.txt", "code.txt"]),
    "imatrix.chunk_count": 7,
    "imatrix.chunk_size": 512,
}
Entries = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Tensor -> sums and counts."""


def as_gguf(entries: Entries, keys: Mapping[str, object] = KEYS, cut: int = 0) -> bytes:
    """As llama-imatrix writes it; `cut` bytes of the end are missing."""
    rows: list[Row] = []
    data = b""
    for name, (sums, counts) in entries.items():
        for suffix, shape, values in (
            (".in_sum2", (len(sums) // max(len(counts), 1), len(counts)), sums),
            (".counts", (1, len(counts)), counts),
        ):
            rows.append((name + suffix, shape, 0, len(data)))
            data += np.array(values, "<f4").tobytes()
            data += bytes(-len(data) % 32)
    header = build(dict(keys), rows)
    header += bytes(-len(header) % 32)
    return (header + data)[: len(header) + len(data) - cut]


def as_dat(entries: Mapping[str, Sequence[float]], calls: int = 4, end: bytes = b"", count: int | None = None) -> bytes:
    """The older format; values are means times calls."""
    data = struct.pack("<i", len(entries) if count is None else count)
    for name, values in entries.items():
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, len(values))
        data += np.array(values, "<f4").tobytes()
    return data + end


def dat_end(chunks: int, dataset: str) -> bytes:
    """What newer llama-imatrix adds to a .dat."""
    return struct.pack("<ii", chunks, len(dataset)) + dataset.encode()
