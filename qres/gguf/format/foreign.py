"""Formats that are not GGUF at all, by their first bytes."""

from __future__ import annotations

_CONVERT = "convert the original model with convert_hf_to_gguf.py"

_MAGICS = (
    (b"tjgg", "an old GGJT model", _CONVERT),  # the GGML family wrote its magic as a little-endian number
    (b"fmgg", "an old GGMF model", _CONVERT),
    (b"lmgg", "an old GGML model", _CONVERT),
    (b"algg", "an old GGLA LoRA adapter", "give the GGUF of the base model"),
    (b"GGJT", "an old GGJT model", _CONVERT),
    (b"GGML", "an old GGML model", _CONVERT),
    (b"version https://git-lfs", "a git-LFS pointer", "fetch the file itself: git lfs pull"),
    (b"PK\x03\x04", "a zip archive or PyTorch checkpoint", f"unpack it, or {_CONVERT}"),
    *((bytes([0x80, n]), "a Python pickle (an old PyTorch checkpoint)", _CONVERT) for n in (2, 3, 4, 5)),
    (b"\x1f\x8b", "gzip-compressed", "decompress it first: gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "decompress it first: zstd -d"),
    (b"\xfd7zXZ", "xz-compressed", "decompress it first: unxz"),
    (b"BZh", "bzip2-compressed", "decompress it first: bunzip2"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (b"\x89HDF", "an HDF5 file", _CONVERT),
)

_PAGE_STARTS = (b"<!doctype", b"<html", b"<?xml")


def foreign_format(head: bytes, file_bytes: int) -> tuple[str, str]:
    """What a file that is not GGUF is, completing "... is", and what to do about it."""
    for start, what, hint in _MAGICS:
        if head.startswith(start):
            return f"{what}, not a GGUF file", hint
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGE_STARTS):
        hint = "the link led to a page (login, error, preview): download the file itself"
        return "a web page, not a GGUF file", hint
    if head[257:262] == b"ustar":
        return "a tar archive, not a GGUF file", "unpack it first: tar -xf"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file_bytes:
        return "a safetensors file, not a GGUF file", _CONVERT
    if not head.strip(b"\0"):
        return "not a GGUF file: it starts with zeros", "the download did not finish: fetch it again"
    return f"not a GGUF file: it starts with {head[:8]!r}", "give a model in GGUF format"
