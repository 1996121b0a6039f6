"""GGUF files of any sort, valid or not, built byte by byte."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from qres.gguf import model_file
from qres.gguf.format.header import Header, parse
from qres.gguf.inventory import Inventory

# ---------------------------------------------------------------- building files, byte by byte


class Typed:
    """A metadata value with an explicit GGUF value type and its bytes."""

    def __init__(self, type_id: int, payload: bytes) -> None:
        self.type_id = type_id
        self.payload = payload


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def strings(texts: Sequence[str | bytes]) -> Typed:
    return Typed(9, struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts)))


def value(item: object) -> bytes:
    match item:
        case Typed():
            return struct.pack("<I", item.type_id) + item.payload
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
    raise TypeError(item)


Row = tuple[str, tuple[int, ...], int, int]
"""Name, shape, type id, offset."""


def build(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]] = (),
    rows: Sequence[Row] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF of any sort, valid or not; `data` zero bytes follow the padded header."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    n_tensors, n_values = counts or (len(rows), len(pairs))
    out = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_values)
    for key, item in pairs:
        out += string(key) + value(item)
    for name, shape, type_id, offset in rows:
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)
    return out + bytes(-len(out) % 32) + bytes(data)


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "general.file_type": 15,
    "llama.block_count": 3,
    "llama.nextn_predict_layers": 1,
    "llama.embedding_length": 64,
    "llama.context_length": 512,
    "llama.vocab_size": 7,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": strings(["a", "b", "", "é"]),
    "tokenizer.ggml.merges": strings(["a b"]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "llama.rope.freq_base": 10000.0,
}
ROWS: list[Row] = [
    ("token_embd.weight", (64, 4), 1, 0),  # F16: 512 bytes
    ("blk.0.attn_norm.weight", (64,), 0, 512),  # F32: 256
    ("blk.0.ffn_up.weight", (64, 2), 6, 768),  # Q5_0: 88
]
VALID = build(LLAMA, ROWS, 896)


EVERY_TYPE: dict[str, object] = {
    "general.architecture": "qwen2",
    **{f"t.scalar{i}": Typed(i, struct.pack(f"<{code}", 1)) for i, code in enumerate("BbHhIif?")},
    **{f"t.scalar{i}": Typed(i, struct.pack(f"<{code}", 1)) for i, code in ((10, "Q"), (11, "q"), (12, "d"))},
    "t.string": "text with ünïcode",
    "t.strings": strings(["", "a", "word"]),
    "t.floats": Typed(9, struct.pack("<IQ3f", 6, 3, 0.5, -1, 2)),
    "t.empty": Typed(9, struct.pack("<IQ", 8, 0)),
    "t.nested": Typed(9, struct.pack("<IQIQ2BIQ", 9, 2, 0, 2, 1, 2, 8, 1) + string("x")),
}


def put(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def inventory(folder: Path, metadata: Mapping[str, object] = LLAMA, rows: Sequence[Row] = ROWS) -> Inventory:
    return model_file.read(put(folder, build(metadata, rows, 1 << 16)))


# ---------------------------------------------------------------- split models


def shard(number: int, count: int, rows: Sequence[Row], total: int = 3, **more: object) -> bytes:
    metadata = {
        "split.no": Typed(2, struct.pack("<H", number)),
        "split.count": Typed(2, struct.pack("<H", count)),
        "split.tensors.count": Typed(5, struct.pack("<i", total)),
    }
    return build((LLAMA if number == 0 else {}) | metadata | more, rows, 1024)


def put_split(folder: Path) -> list[Path]:
    parts: list[list[Row]] = [
        [],
        ROWS[:2],
        [("blk.0.ffn_up.weight", (64, 2), 6, 0)],
    ]  # gguf-split --no-tensor-first-split
    return [put(folder, shard(i, 3, rows), f"tiny-{i + 1:05d}-of-00003.gguf") for i, rows in enumerate(parts)]


def break_split(folder: Path, how: str) -> Path:
    paths = put_split(folder)
    if how == "missing":
        paths[2].unlink()
    elif how == "renamed":
        return paths[1].rename(folder / "model.gguf")
    elif how == "wrong number":
        paths[0].unlink()
        return paths[1].rename(paths[0])
    elif how == "swapped":
        paths[2].write_bytes(paths[1].read_bytes())
    elif how == "other set":
        paths[2].write_bytes(shard(2, 4, []))
    elif how == "twice":
        paths[2].write_bytes(shard(2, 3, ROWS[:1]))
    elif how == "fewer":
        paths[2].write_bytes(shard(2, 3, []))
    elif how == "cut off":
        paths[2].write_bytes(paths[2].read_bytes()[:200])
    return paths[0]


# ---------------------------------------------------------------- what is not a usable file


def swapped(data: bytes) -> bytes:
    return data[:4] + data[4:8][::-1] + data[8:]


# ---------------------------------------------------------------- tolerant reading


def parsed(data: bytes) -> Header:
    return parse(io.BytesIO(data), len(data), Path("bytes.gguf"))


def odd(key: str, data: bytes, type_id: int = 77) -> bytes:
    """The file with another type id, or other bytes for it, behind a key."""
    at = data.index(string(key)) + len(string(key))
    return data[:at] + struct.pack("<I", type_id) + data[at + 4 :]
