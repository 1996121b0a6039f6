"""A whole tiny model as a header and zeros, and the ways in which its header can be damaged."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

from tests.gguf.building import Row, Typed, build, strings

N_EMBD, N_FF, N_VOCAB, N_LAYER = 64, 96, 262, 2

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "general.file_type": 1,
    "llama.block_count": N_LAYER,
    "llama.context_length": 256,
    "llama.embedding_length": N_EMBD,
    "llama.feed_forward_length": N_FF,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 32,
    "llama.vocab_size": N_VOCAB,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": strings([f"t{i}" for i in range(N_VOCAB)]),
    "tokenizer.ggml.token_type": Typed(9, struct.pack(f"<IQ{N_VOCAB}i", 5, N_VOCAB, *[1] * N_VOCAB)),
    "tokenizer.ggml.merges": strings(["t 1"]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
}

Tensor = tuple[str, tuple[int, ...], int]
"""Name, shape, type id."""


def tensors() -> list[Tensor]:
    """Of the whole model: matrices F16, vectors F32."""
    found: list[Tensor] = [("token_embd.weight", (N_EMBD, N_VOCAB), 1)]
    for i in range(N_LAYER):
        found += [(f"blk.{i}.{part}_norm.weight", (N_EMBD,), 0) for part in ("attn", "ffn")]
        found += [(f"blk.{i}.attn_{part}.weight", (N_EMBD, N_EMBD), 1) for part in ("q", "k", "v", "output")]
        found += [(f"blk.{i}.ffn_{part}.weight", (N_EMBD, N_FF), 1) for part in ("gate", "up")]
        found.append((f"blk.{i}.ffn_down.weight", (N_FF, N_EMBD), 1))
    return [*found, ("output_norm.weight", (N_EMBD,), 0), ("output.weight", (N_EMBD, N_VOCAB), 1)]


def n_bytes(tensor: Tensor) -> int:
    """Of F32, F16 or Q8_0 (types 0, 1 and 8)."""
    n = 1
    for length in tensor[1]:
        n *= length
    return {0: n * 4, 1: n * 2, 8: n // 32 * 34, 30: n * 2}.get(tensor[2], n * 4)


def placed(rows: Sequence[Tensor], align: int = 32, gap: tuple[int, int] = (-1, 0)) -> tuple[list[Row], int]:
    """The tensors one behind the other, and the bytes of their data; `gap` is (index, bytes before it)."""
    at, found = 0, []
    for i, tensor in enumerate(rows):
        at += gap[1] if i == gap[0] else 0
        found.append((*tensor, at))
        at += -(-n_bytes(tensor) // align) * align
    return found, at


def whole(changes: dict[str, object] | None = None, rows: Sequence[Tensor] | None = None) -> bytes:
    """The model, with other metadata (None: left out) or other tensors."""
    metadata = {key: item for key, item in (METADATA | (changes or {})).items() if item is not None}
    laid, size = placed(tensors() if rows is None else rows)
    return build(metadata, laid, size)


def _metadata() -> Iterator[tuple[str, bytes]]:
    for key in METADATA:
        yield f"without {key}", whole({key: None})
        yield f"text in {key}", whole({key: "x"})
    numbers = [key for key, item in METADATA.items() if key.startswith("llama.") and type(item) is int]
    for key in numbers:
        for number in (0, 1, 3, 1000, 2**32 - 1):
            yield f"{key} {number}", whole({key: number})
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        yield f"epsilon {epsilon}", whole({"llama.attention.layer_norm_rms_epsilon": epsilon})
    for count in (0, 1, 261, 263):
        yield f"{count} tokens", whole({"tokenizer.ggml.tokens": strings([f"t{i}" for i in range(count)])})
        types = Typed(9, struct.pack(f"<IQ{count}i", 5, count, *[1] * count))
        yield f"{count} token types", whole({"tokenizer.ggml.token_type": types})
    for key in ("bos", "eos"):
        yield f"{key} out of range", whole({f"tokenizer.ggml.{key}_token_id": 5000})
    for name in ("nothing", "clip", "gpt2", "qwen2", "gemma", "mamba", "Llama"):
        yield f"architecture {name}", whole({"general.architecture": name})
    for pre in ("brand-new-bpe", "", "llama-bpe", "default"):
        yield f"pre {pre}", whole({"tokenizer.ggml.pre": pre})


def _tables() -> Iterator[tuple[str, bytes]]:
    rows = tensors()
    for i, (name, shape, type_id) in enumerate(rows):
        yield f"without {name}", whole(rows=rows[:i] + rows[i + 1 :])
        others = {"transposed": shape[::-1], "a row more": (*shape[:-1], shape[-1] + 32), "3-D": (*shape, 1, 2)}
        for what, other in others.items():
            if other != shape:
                yield f"{name} {what}", whole(rows=[*rows[:i], (name, other, type_id), *rows[i + 1 :]])
        for kind in (0, 1, 8, 30):
            if kind != type_id:
                yield f"{name} as type {kind}", whole(rows=[*rows[:i], (name, shape, kind), *rows[i + 1 :]])
        if i:
            laid, size = placed(rows, gap=(i, 64))
            yield f"gap before {name}", build(METADATA, laid, size)
    extra = ("v.blk.0.attn_q.weight", "mm.0.weight", "a.conv1d.weight", "blk.9.attn_q.weight", "x.weight")
    for name in (*extra, "blk.0.attn_q.bias", "rope_freqs.weight", "n" * 63, "n" * 64, "n" * 100):
        yield f"extra {name[:70]}", whole(rows=[*rows, (name, (64,), 0)])
    yield "extra tower at F16", whole(rows=[*rows, ("v.patch_embd.weight", (64, 64), 1)])
    for align in (1, 2, 4, 8, 16, 64, 128, 48):
        laid, size = placed(rows, align)
        out = build(METADATA | {"general.alignment": align}, laid, 0)
        for pad in (0, 8):  # other lengths of the header
            longer = METADATA | {"general.alignment": align, "general.name": "Tiny" + "x" * pad}
            out = build(longer, laid, 0)
            head = len(out.rstrip(b"\0")) if align < 32 else len(out)
            yield f"alignment {align}, {pad} more", out[: -(-head // align) * align] + bytes(size + 64)


def _bytes(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Random bytes of the header overwritten."""
    dice, good = random.Random(seed), whole()
    end = len(good) - placed(tensors())[1]
    for i in range(count):
        data = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            data[dice.randrange(8, end)] = dice.randrange(256)
        yield f"random bytes {i}", bytes(data)


def damaged() -> dict[str, bytes]:
    """Name of the damage -> the file."""
    return {"whole": whole(), **dict(_metadata()), **dict(_tables()), **dict(_bytes(0, 60))}
