"""A GGUF read, changed and written again: metadata as it is but for what is changed, tensors as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np

from tests.tiny import Floats

Value = tuple[Sequence[gguf.GGUFValueType], object]
"""Value types, of an array with that of its elements, and the value."""


@dataclass(frozen=True)
class Data:
    """One tensor."""

    name: str
    shape: tuple[int, ...]
    """In ggml's order, the row length first."""
    type: gguf.GGMLQuantizationType
    raw: bytes

    @property
    def values(self) -> Floats:
        """float32, in numpy's order of dimensions."""
        flat = np.frombuffer(self.raw, np.uint8)
        return np.asarray(gguf.quants.dequantize(flat, self.type), np.float32).reshape(self.shape[::-1])

    def at(self, kind: gguf.GGMLQuantizationType) -> Data:
        """The tensor in another type."""
        return made(self.name, self.values, kind)


def made(name: str, values: Floats, kind: gguf.GGMLQuantizationType) -> Data:
    """A tensor of these values."""
    raw = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind).tobytes()
    return Data(name, values.shape[::-1], kind, raw)


def u32(value: int) -> Value:
    """A metadata value."""
    return [gguf.GGUFValueType.UINT32], value


def f32(value: float) -> Value:
    """A metadata value."""
    return [gguf.GGUFValueType.FLOAT32], value


def load(path: Path) -> tuple[dict[str, Value], list[Data]]:
    """Metadata and tensors of a file."""
    reader = gguf.GGUFReader(path)
    metadata: dict[str, Value] = {
        key: (list(field.types), field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    tensors = [Data(t.name, tuple(int(n) for n in t.shape), t.tensor_type, t.data.tobytes()) for t in reader.tensors]
    return metadata, tensors


def save(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Data]) -> Path:
    """Write a file."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    for key, (types, value) in metadata.items():
        if value == []:  # gguf-py writes no empty arrays
            continue
        writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    for tensor in tensors:
        raw = np.frombuffer(tensor.raw, np.uint8)
        rows = raw.reshape(*tensor.shape[:0:-1], -1)
        writer.add_tensor(tensor.name, rows, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def is_matrix(tensor: Data) -> bool:
    """Whether a quantizer would take it."""
    stay = ("norm", "bias", "ffn_gate_inp", ".scale", "input_scale")
    return len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0 and not any(word in tensor.name for word in stay)


def at(tensors: Sequence[Data], kind: gguf.GGMLQuantizationType) -> list[Data]:
    """All matrices in a type."""
    return [tensor.at(kind) if is_matrix(tensor) else tensor for tensor in tensors]


def renamed(tensor: Data, name: str) -> Data:
    """The tensor by another name."""
    return replace(tensor, name=name)
