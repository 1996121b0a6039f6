"""Cases about single files: what is no GGUF, what is a damaged one, and parts of a split model."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gguf.building import Row, Typed, build, put, swapped
from tests.inputs.case import FULL, HEADER, ROOM, Build, array, case, full, inspect, scan, u64

CONVERT, AGAIN = "convert_hf_to_gguf.py", "fetch it again"


def zipped() -> bytes:
    """A checkpoint of today's PyTorch is a zip archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    return out.getvalue()


def tarred() -> bytes:
    """A tar archive, whose magic is at byte 257."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("m.gguf")
        info.size = len(full())
        archive.addfile(info, io.BytesIO(full()))
    return out.getvalue()


SAFETENSORS = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
FOREIGN: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("m.gguf is empty (0 bytes)", AGAIN)),
    "one-byte": (b"G", ("not a GGUF file", "b'G'")),
    "zeros": (bytes(5000), ("starts with zeros", AGAIN)),
    "ggjt": (b"tjgg\3\0\0\0" + bytes(99), ("old GGJT model", CONVERT)),
    "ggml": (b"lmgg" + bytes(99), ("old GGML model", CONVERT)),
    "ggmf": (b"fmgg\1\0\0\0" + bytes(99), ("old GGMF model", CONVERT)),
    "ggla": (b"algg\1\0\0\0" + bytes(99), ("old GGLA LoRA adapter", "base model")),
    "html": (b"\xef\xbb\xbf\r\n <!DOCTYPE HTML>\n<title>Sign in</title>", ("web page", "download the file itself")),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", ("web page", "download the file")),
    "lfs-pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        ("git-LFS pointer", "git lfs pull"),
    ),
    "xet-or-error-text": (b"Entry not found", ("not a GGUF file", "b'Entry no'")),
    "error-json": (b'{"error": "Repository not found"}', ("not a GGUF file",)),
    "safetensors": (u64(len(SAFETENSORS)) + SAFETENSORS + bytes(4), ("safetensors", CONVERT)),
    "pickle-2": (pickle.dumps({"a": 1}, 2), ("Python pickle", CONVERT)),
    "pickle-4": (pickle.dumps({"a": 1}, 4), ("Python pickle", CONVERT)),
    "zip": (zipped(), ("zip archive or PyTorch checkpoint", CONVERT)),
    "gzip": (gzip.compress(full()), ("gzip-compressed", "gunzip")),
    "xz": (lzma.compress(full()), ("xz-compressed", "unxz")),
    "bzip2": (bz2.compress(full()), ("bzip2-compressed", "bunzip2")),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(99), ("zstd-compressed", "zstd -d")),
    "tar": (tarred(), ("tar archive", "npack it")),
    "python-source": (b"#!/usr/bin/env python3\nimport torch\n", ("not a GGUF file",)),
    "version-0": (build(version=0), ("GGUF version 0", "versions 2 and 3", "onvert")),
    "version-1": (build(version=1), ("GGUF version 1", "versions 2 and 3", "onvert")),
    "version-99": (build(version=99), ("GGUF version 99", "versions 2 and 3", "pdate qres")),
    "big-endian": (swapped(full()), ("big-endian", "little-endian")),
    "magic-only": (b"GGUF", ("truncated", AGAIN)),
    "cut-in-the-counts": (full()[:20], ("truncated", AGAIN)),
}
"""Bytes -> words; scan and inspect refuse them alike."""
UNSUPPORTED = {"version-0", "version-1", "version-99", "big-endian"}

NOT_GGUF = [
    case(
        f"{command}-{name}",
        name,
        make(data),
        *words,
        code=4 if name in UNSUPPORTED else 3,
    )
    for name, (data, words) in FOREIGN.items()
    for command, make in (("scan", scan), ("inspect", inspect))
]

# ---------------------------------------------------------------- damaged


def rows(*more: Row) -> list[Row]:
    """The tensors of a 16-bit model and some more."""
    return [*FULL, *more]


BROKEN: dict[str, tuple[bytes, int, tuple[str, ...]]] = {
    "cut-in-metadata": (full()[:150], 3, ("damaged or truncated", AGAIN)),
    "cut-in-the-tensor-table": (full()[: full().index(b"attn_norm") + 5], 3, ("truncated", AGAIN)),
    "cut-in-the-data": (full()[:-400], 3, ("truncated: tensor 'blk.0.", "the file has", AGAIN)),
    "no-data-at-all": (full()[:-ROOM], 3, ("truncated: tensor 'token_embd.weight' ends at byte", AGAIN)),
    "tensor-beyond-the-file": (full(rows=rows(("a", (64,), 0, 1 << 40))), 3, ("truncated: tensor 'a'", AGAIN)),
    "offset-2^63": (full(rows=rows(("a", (64,), 0, 1 << 63))), 3, ("tensor 'a'", AGAIN)),
    "2^63-tensors": (
        build(HEADER, FULL, ROOM, counts=(1 << 63, len(HEADER))),
        3,
        ("claims 9223372036854775808", AGAIN),
    ),
    "2^63-values": (build(HEADER, FULL, ROOM, counts=(3, 1 << 63)), 3, ("claims 9223372036854775808", AGAIN)),
    "string-of-4-GB": (full({"a": Typed(8, u64(1 << 32))}), 3, ("'a'", "4294967296 bytes", AGAIN)),
    "key-of-4-GB": (
        full().replace(u64(20) + b"general.", u64(1 << 32) + b"general."),
        3,
        ("name of 4294967296 bytes",),
    ),
    "array-of-2^63": (full({"a": array(4, 1 << 63)}), 3, ("'a'", "9223372036854775808 elements", AGAIN)),
    "string-in-an-array-of-4-GB": (full({"a": array(8, 1, u64(1 << 32))}), 3, ("'a'", "4294967296", AGAIN)),
    "arrays-nested-40-deep": (full({"a": Typed(9, struct.pack("<IQ", 9, 1) * 40)}), 3, ("'a'", "nested", AGAIN)),
    "unknown-value-type": (full({"a": Typed(77, bytes(8))}), 3, ("'a'", "unknown value type 77", "update qres")),
    "unknown-element-type": (full({"a": array(77, 1)}), 3, ("'a'", "unknown value type 77", "update qres")),
    "key-twice": (build([*HEADER.items(), ("llama.block_count", 2)], FULL, ROOM), 3, ("llama.block_count", "twice")),
    "tensor-twice": (full(rows=rows(FULL[0])), 3, ("'token_embd.weight' appears twice", AGAIN)),
    "key-without-a-name": (full({"": 1}), 3, ("no key", AGAIN)),
    "tensor-without-a-name": (full(rows=rows(("", (64,), 0, 0))), 3, ("has no name", AGAIN)),
    "five-dimensions": (full(rows=rows(("a", (1,) * 5, 0, 0))), 3, ("'a' has 5 dimensions, at most 4", AGAIN)),
    "shape-that-overflows": (full(rows=rows(("a", (1 << 40, 1 << 40), 0, 0))), 3, ("impossible shape", AGAIN)),
    "rows-that-fill-no-block": (full(rows=rows(("a", (100, 4), 12, 0))), 3, ("rows of 100", "Q4_K's block", AGAIN)),
    "alignment-0": (full({"general.alignment": 0}), 3, ("general.alignment is 0, not a power of two", AGAIN)),
    "alignment-24": (full({"general.alignment": 24}), 3, ("general.alignment is 24, not a power of two", AGAIN)),
    "alignment-text": (full({"general.alignment": "32"}), 3, ("general.alignment is '32', not a number",)),
    "alignment-2^31": (full({"general.alignment": 1 << 31}), 3, ("truncated", AGAIN)),
    "unknown-tensor-type": (full(rows=rows(("a", (64, 2), 153, 0))), 4, ("type 153", "'a'", "Update qres")),
    "removed-type-4": (full(rows=rows(("a", (64, 2), 4, 0))), 4, ("'a'", "no longer")),
    "removed-type-31": (
        full(rows=rows(("a", (64, 2), 31, 0))),
        4,
        ("Q4_0_4_4", "no longer reads", "Quantize it again"),
    ),
    "removed-type-36": (full(rows=rows(("a", (64, 2), 36, 0))), 4, ("IQ4_NL_4_4", "no longer reads")),
    "architecture-that-is-a-number": (full({"general.architecture": 7}), 3, ("does not name its architecture",)),
}
"""Bytes, exit code and words of a scan; what of them llama.cpp alone finds is tested with it."""

DAMAGED = [
    *(
        case(f"scan-{name}", f"a GGUF with {name}", scan(data), *words, code=code)
        for name, (data, code, words) in BROKEN.items()
    ),
    *(
        case(f"inspect-{name}", f"a GGUF with {name}", inspect(data), "Neither: ", "kind", code=0)
        for name, (data, _, _) in BROKEN.items()
    ),
    case(
        "inspect-block-of-5000-digits",
        "a block number that Python makes no int of",
        inspect(full(rows=rows((f"blk.{'9' * 5000}.x.weight", (64,), 0, 700)))),
        "Neither: it is not loadable: tensor 'blk.9",
        "has a name of 5013 bytes, llama.cpp takes 63",
        code=0,
    ),
    case("inspect-version-2", "a GGUF of version 2", inspect(build(HEADER, FULL, ROOM, version=2)), "GGUF 2", code=0),
]

# ---------------------------------------------------------------- paths


def beside(name: str, *arguments: str, made: Callable[[Path], object] = Path.touch) -> Build:
    """Something that is no file, by that name."""

    def make(folder: Path) -> Sequence[str]:
        made(folder / name)
        return [*(arguments or ("scan",)), name]

    return make


def folder_with_a_model(path: Path) -> None:
    """What a download of a repository leaves."""
    path.mkdir()
    put(path, full(), "b.gguf")


def below_a_file(folder: Path) -> Sequence[str]:
    """A path through a file."""
    put(folder, full())
    return ["scan", "model.gguf/m.gguf"]


def unreadable(folder: Path) -> Sequence[str]:
    """No permission to read; means nothing to root."""
    put(folder, full()).chmod(0)
    return ["scan", "model.gguf"]


PATHS = [
    case("missing", "a name without a file", lambda _: ["scan", "gone.gguf"], "gone.gguf does not exist"),
    case("missing-to-inspect", "the same", lambda _: ["inspect", "gone.gguf"], "gone.gguf does not exist"),
    case("missing-candidate", "the same, second", lambda f: [*scan(full())(f), "gone.gguf"], "gone.gguf", "exist"),
    case("model-empty-word", "a variable that is not set", lambda _: ["scan", ""], "empty", code=2),
    case("folder", "an empty folder", beside("d", made=Path.mkdir), "d is a directory", "Give a .gguf file"),
    case("folder-of-a-model", "with a GGUF in it", beside("d", made=folder_with_a_model), "such as b.gguf"),
    case("pipe", "a FIFO that nobody writes to", beside("p", made=os.mkfifo), "p is not a regular file"),
    case("device", "a device", lambda _: ["scan", os.devnull], "is not a regular file", "a file on disk"),
    case("broken-link", "to nothing", beside("l", made=lambda p: p.symlink_to("x")), "l does not exist"),
    case("link-to-itself", "a circle", beside("l", made=lambda p: p.symlink_to("l")), "cannot read l"),
    case("below-a-file", "a path through a file", below_a_file, "cannot read model.gguf/m.gguf"),
    case("name-too-long", "5000 characters", lambda _: ["scan", "x" * 5000], "cannot read"),
    case("nul-in-the-name", "no shell passes that on", lambda _: ["scan", "a\0b.gguf"], "null byte", code=2),
    case(
        "unreadable",
        "a file that may not be read",
        unreadable,
        "no permission",
        "owner and mode",
        not_root=True,
    ),
]
