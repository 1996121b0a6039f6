"""Broken files of every sort, each with the words that explain it; and where the fuzzer starts from."""

from __future__ import annotations

import gzip
import re
import struct

from tests.gguf.building import EVERY_TYPE, LLAMA, ROWS, VALID, Typed, build, odd, shard, string, swapped

# ---------------------------------------------------------------- what is not a usable file

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is empty \(0 bytes\).*fetch it again"),
    "two bytes": (b"GG", r"not a GGUF file: it starts with b'GG'"),
    "magic only": (b"GGUF", r"the header needs 4 bytes, 0 of 4 are left"),
    "ggjt": (b"tjgg\3\0\0\0", "old GGJT model"),
    "ggml": (b"lmgg" + bytes(40), "old GGML model"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-LFS pointer.*git lfs pull"),
    "html": (b"\n<!DOCTYPE html><html>", "a web page"),
    "pytorch": (b"PK\3\4" + bytes(40), "zip archive or PyTorch checkpoint"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}' + bytes(20), "safetensors file"),
    "gzip": (gzip.compress(VALID), "gzip-compressed"),
    "zeros": (bytes(4096), "starts with zeros"),
    "text": (b"Entry not found", "not a GGUF file: it starts with b'Entry no'"),
    "version 0": (build(version=0), "GGUF version 0"),
    "version 1": (build(version=1), "GGUF version 1; llama.cpp reads versions 2 and 3.*convert"),
    "version 99": (build(version=99), "GGUF version 99.*update"),
    "big-endian": (swapped(VALID), "big-endian"),
    "cut in header": (VALID[:100], "damaged or truncated"),
    "cut in data": (
        VALID[: len(VALID) - 100],
        r"truncated: tensor 'blk.0.ffn_up.weight' ends at byte \d+, the file has",
    ),
    "absurd tensors": (build(LLAMA, counts=(2**60, len(LLAMA))), "claims 1152921504606846976 tensors"),
    "absurd metadata": (build(counts=(0, 2**63)), "claims 9223372036854775808 metadata values"),
    "absurd key": (build(counts=(0, 1))[:24] + struct.pack("<Q", 2**62) + bytes(64), "has a name of 46"),
    "absurd string": (build({"a": Typed(8, struct.pack("<Q", 2**62))}), "claims 4611686018427387904 bytes"),
    "absurd array": (build({"a": Typed(9, struct.pack("<IQ", 4, 2**62))}), "claims 4611686018427387904 elements"),
    "absurd array of strings": (build({"a": Typed(9, struct.pack("<IQQ", 8, 1, 2**62))}), "needs 4611686018427387904"),
    "deep nesting": (build({"a": Typed(9, struct.pack("<IQ", 9, 1) * 40)}), "nested 5 deep"),
    "value type": (build({"a": Typed(77, bytes(8))}), "'a' has the unknown value type 77"),
    "element type": (build({"a": Typed(9, struct.pack("<IQ", 77, 1))}), "unknown value type 77"),
    "key twice": (build([("a", 1), ("a", 2)]), "'a' appears twice"),
    "no key": (build({"": 1}), "has no key"),
    "tensor twice": (build(LLAMA, [ROWS[0], ROWS[0]], 512), "'token_embd.weight' appears twice"),
    "five dimensions": (build(LLAMA, [("t", (1,) * 5, 0, 0)], 512), "5 dimensions, at most 4"),
    "overflow": (build(LLAMA, [("t", (2**40, 2**40), 0, 0)], 512), "impossible shape"),
    "overflow behind zero": (build(LLAMA, [("t", (0, 2**40, 2**40), 0, 0)], 512), "impossible shape"),
    "huge tensor": (build(LLAMA, [("t", (2**40, 4), 0, 0)], 512), "truncated: tensor 't' ends at byte"),
    "huge offset": (build(LLAMA, [("t", (4,), 153, 2**63)], 512), "truncated: tensor 't' ends at byte"),
    "row and block": (
        build(LLAMA, [("t", (100, 4), 12, 0)], 4096),
        "rows of 100, not a multiple of Q4_K's block of 256",
    ),
    "alignment": (build(LLAMA | {"general.alignment": 24}, ROWS, 2048), "general.alignment is 24"),
    "alignment text": (
        build(LLAMA | {"general.alignment": "32"}, ROWS, 2048),
        "general.alignment is '32', not a number",
    ),
}


# ---------------------------------------------------------------- tolerant reading

FALSE_LENGTHS = {
    "tensors": build(counts=(2**63, 0)),
    "values": build(counts=(0, 2**63)),
    "string": build({"a": Typed(8, struct.pack("<Q", 2**33))}),
    "string in an array": build({"a": Typed(9, struct.pack("<IQQ", 8, 1, 2**33))}),
    "bytes": build({"a": Typed(9, struct.pack("<IQ", 0, 2**63))}),
    "doubles": build({"a": Typed(9, struct.pack("<IQ", 12, 2**30))}),
    "strings": build({"a": Typed(9, struct.pack("<IQ", 8, 2**29))}),
    "arrays": build({"a": Typed(9, struct.pack("<IQ", 9, 2**28))}),
    "nested": build({"a": Typed(9, struct.pack("<IQIQ", 9, 1, 8, 2**28))}),
}


def seeds() -> dict[str, bytes]:
    """Small files of every sort, to start the fuzzer from."""
    files = {re.sub(r"\W+", "-", name): data for name, (data, _) in BROKEN.items()}
    files |= {f"false-{name.replace(' ', '-')}": data for name, data in FALSE_LENGTHS.items()}
    files |= {
        "valid": VALID,
        "valid-2": build(LLAMA, ROWS, 896, version=2),
        "every-type": build(EVERY_TYPE, ROWS, 896),
        "alignment-64": build(LLAMA | {"general.alignment": 64}, ROWS, 960),
        "unknown-tensor-type": build(LLAMA, [*ROWS, ("blk.0.new.weight", (64, 2), 153, 864)], 896),
        "every-tensor-type": build({}, [(f"t{i}", (256,), i, 0) for i in range(43)], 1024),
        "shard-1": shard(0, 3, []),
        "shard-2": shard(1, 3, ROWS[:2]),
        "vocabulary": build(LLAMA),
        "not-utf-8": build({"general.name": Typed(8, string(b"\xff\xfe"))}, ROWS, 896),
        "lora": build({"general.type": "adapter"}, [("blk.0.attn_q.weight.lora_a", (32, 2), 1, 0)], 128),
        "nextn-only": build(LLAMA, [("blk.2.nextn.eh_proj.weight", (32, 2), 1, 0)], 128),
    }
    files |= {f"odd-{key}": odd(key, VALID) for key in LLAMA}
    files |= {f"cut-{size}": VALID[:size] for size in range(40, len(VALID), 97)}
    return files
