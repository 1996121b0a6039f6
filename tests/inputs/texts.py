"""Cases about what a model is measured on: texts and token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gguf.building import put
from tests.inputs.case import ACCEPTED, Build, case, full, scan


def text(data: bytes, option: str = "--text") -> Build:
    """A scan on a text, or on token ids, of these bytes."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, data, "t.txt")
        return [*scan(full())(folder), option, "t.txt"]

    return make


def source(name: str, option: str = "--text", made: Callable[[Path], object] | None = None) -> Build:
    """A scan with something else as text: `made` puts it there."""

    def make(folder: Path) -> Sequence[str]:
        if made:
            made(folder / name)
        return [*scan(full())(folder), option, name]

    return make


UTF8, PLAIN = "onvert it to UTF-8", "give a text file, not a binary one"
LONGER = "few thousand words"
TEXTS = [
    case("text-empty", "0 bytes", text(b""), "t.txt is empty", LONGER),
    case("text-white-space", "nothing to read", text(b" \n\t\r\n\x0b "), "t.txt is empty", LONGER),
    case("text-mark-only", "a byte order mark and no text", text(b"\xef\xbb\xbf"), "t.txt is empty", LONGER),
    case(
        "text-latin-1",
        "text of an old system",
        text("caf\u00e9 au lait ".encode("latin-1") * 99),
        "byte 3 is 0xe9",
        UTF8,
    ),
    case("text-utf-16", "of Windows' editor", text("hello ".encode("utf-16")), "not UTF-8", "byte 0 is 0xff", UTF8),
    case(
        "text-utf-16-without-a-mark",
        "text of Windows, its mark lost",
        text("hello ".encode("utf-16-le")),
        "NUL bytes at 1",
        PLAIN[1:],
    ),
    case("text-cut-character", "the last one", text("a\u20ac".encode()[:-1]), "not UTF-8", "byte 1 is 0xe2", UTF8),
    case("text-surrogate", "what some programs write", text(b"a\xed\xa0\x80b"), "not UTF-8", "byte 1 is 0xed", UTF8),
    case(
        "text-behind-a-mark",
        "an error behind a byte order mark",
        text(b"\xef\xbb\xbfa\xff"),
        "byte 4 is 0xff",
        UTF8,
    ),
    case("text-nul", "a NUL byte between words", text(b"words \0 words"), "NUL bytes at 6", PLAIN[1:]),
    case("text-a-model", "the model by mistake", text(full()), "t.txt"),
    case("text-folder", "a folder as text", source("d", made=Path.mkdir), "d is a folder", "Give a file"),
    case(
        "text-missing",
        "a text that is not there",
        source("gone.txt"),
        "cannot read gone.txt: No such file",
    ),
    case("ids-empty-name", "the same for ids", source("", "--tokens"), "--tokens", "empty", code=2),
    case("text-empty-name", "a variable that is not set", source(""), "empty", code=2),
    case(
        "text-name-too-long",
        "5000 characters as the name of a text",
        source("x" * 5000),
        "cannot read",
        "too long",
    ),
    case(
        "text-endless", "a device that never ends", source("/dev/zero"), "larger than 256 MiB", "few hundred kilobytes"
    ),
    case(
        "text-unreadable",
        "a text that may not be read",
        source("t.txt", made=lambda path: path.touch(0)),
        "cannot read t.txt",
        not_root=True,
    ),
    case("text-stdin", "text on standard input", source("-"), "passed", code=ACCEPTED, stdin=b"words " * 99),
    case("text-stdin-empty", "nothing on standard input", source("-"), "standard input is empty", LONGER),
    case("text-stdin-closed", "no standard input", source("-"), "standard input is empty", LONGER, stdin=None),
    case(
        "text-stdin-latin-1",
        "Latin-1 on standard input",
        source("-"),
        "standard input is not UTF-8",
        UTF8,
        stdin=b"caf\xe9",
    ),
    case("text-good", "with a byte order mark and CRLF", text(b"\xef\xbb\xbfwords\r\n" * 9), "passed", code=ACCEPTED),
    case("ids-good", "with commas", text(b"1, 2,3\n4\t5\r\n", "--tokens"), "passed", code=ACCEPTED),
    case(
        "ids-empty",
        "a file of ids with 0 bytes",
        text(b"", "--tokens"),
        "t.txt holds no token ids",
        "whole numbers separated by spaces",
    ),
    case("ids-commas", "nothing but separators", text(b" , ,\n", "--tokens"), "holds no token ids", "whole numbers"),
    case("ids-words", "a text by mistake", text(b"once upon a time", "--tokens"), "'once' is not a token id", "--text"),
    case(
        "ids-negative",
        "a negative number",
        text(b"1 -1 2", "--tokens"),
        "'-1' is not a token id",
        "whole numbers",
    ),
    case(
        "ids-floats",
        "a number with a point",
        text(b"1 2.0 3", "--tokens"),
        "'2.0' is not a token id",
        "whole numbers",
    ),
    case(
        "ids-exponent",
        "a number with an exponent",
        text(b"1 1e3", "--tokens"),
        "'1e3' is not a token id",
        "whole numbers",
    ),
    case(
        "ids-json",
        "a list of numbers",
        text(b"[1, 2, 3]", "--tokens"),
        "'[1' is not a token id",
        "whole numbers",
    ),
    case("ids-huge", "more digits than an id has", text(b"99999999999", "--tokens"), "'99999999999' is not a token"),
    case("ids-very-long", "a word of a megabyte", text(b"9" * (1 << 20), "--tokens"), "is not a token id"),
    case(
        "ids-binary",
        "ids as 16-bit numbers, and an escape sequence",
        text(b"\x01\x00\x02\x00\x1b[2J", "--tokens"),
        "t.txt",
        "is not a token id",
    ),
    case("ids-utf-16", "ids in UTF-16", text("1 2 3".encode("utf-16"), "--tokens"), "is not a token id"),
    case("ids-other-digits", "Arabic ones", text("\u0661 \u0662".encode(), "--tokens"), "is not a token id"),
    case(
        "ids-missing",
        "a file of ids that is not there",
        source("gone.txt", "--tokens"),
        "cannot read gone.txt: No such file",
    ),
    case("ids-folder", "a folder as ids", source("d", "--tokens", Path.mkdir), "d is a folder", "Give a file"),
    case(
        "ids-stdin-words",
        "words on standard input",
        source("-", "--tokens"),
        "standard input: 'a' is not a token id",
        stdin=b"a",
    ),
    case(
        "no-tokenizer",
        "text for a model without one",
        scan(full({"tokenizer.ggml.model": "none"})),
        "m.gguf has no tokenizer",
        "--tokens FILE",
    ),
]
