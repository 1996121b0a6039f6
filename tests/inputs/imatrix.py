"""Cases about importance matrices: what is none, damaged ones, ones of another model, and where one may be written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gguf.building import Row, build, put
from tests.gguf.imatrices import KEYS, as_dat, as_gguf
from tests.inputs.case import ACCEPTED, Case, case, full, scan, small

UP = "blk.0.ffn_up.weight"
ONES = [1.0] * 64
GOOD = as_gguf({UP: (ONES, [1])})
GIVE = "Give the file that llama-imatrix, or --make-imatrix, wrote"
LOST: list[Row] = [(f"{UP}.in_sum2", (64, 1), 0, 0)]
UNEVEN: list[Row] = [(f"{UP}.in_sum2", (64, 1), 0, 0), (f"{UP}.counts", (1, 3), 0, 256)]
HALF: list[Row] = [(f"{UP}.in_sum2", (64, 1), 1, 0), (f"{UP}.counts", (1, 1), 0, 128)]


def given(id: str, what: str, data: bytes, *words: str, code: int = 3, options: str = "--levels Q8_0") -> Case:
    """A scan of a good model with these bytes as its importance matrix."""

    def make(folder: Path) -> Sequence[str]:
        put(folder, data, "i.gguf")
        return [*scan(full())(folder), "--imatrix", "i.gguf", *options.split()]

    return case(f"imatrix-{id}", what, make, *words, code=code)


def named(name: str, what: str, *words: str, code: int = 3) -> Case:
    """A scan of a good model, beside a folder `d`, with this name as its importance matrix."""

    def make(folder: Path) -> Sequence[str]:
        (folder / "d").mkdir()
        return [*scan(full())(folder), "--imatrix", name]

    return case(f"imatrix-named-{name or 'empty'}", what, make, *words, code=code)


def made(name: str, prepare: Callable[[Path], object] | None, *words: str, code: int = 3, root: bool = True) -> Case:
    """A scan that is to write an importance matrix into something that `prepare` puts there."""

    def make(folder: Path) -> Sequence[str]:
        if prepare:
            prepare(folder)
        return [*scan(full())(folder), "--text", "t.txt", "--make-imatrix", name]

    def with_text(folder: Path) -> Sequence[str]:
        put(folder, b"words " * 99, "t.txt")
        return make(folder)

    id = f"make-imatrix-{name[:20].replace('/', '-') or 'empty'}"
    return case(id, f"--make-imatrix {name!r}", with_text, *words, code=code, not_root=not root)


def closed(folder: Path) -> None:
    """A folder that may only be read."""
    (folder / "closed").mkdir(0o555)


def with_files(folder: Path) -> Sequence[str]:
    """Quantized files, and an importance matrix."""
    put(folder, GOOD, "i.gguf")
    put(folder, small(), "q.gguf")
    return [*scan(full())(folder), "q.gguf", "--imatrix", "i.gguf"]


def over_itself(folder: Path) -> Sequence[str]:
    """The one that is read is to be written."""
    put(folder, GOOD, "i.gguf")
    (folder / "o.gguf").symlink_to("i.gguf")
    return [*scan(full())(folder), "--imatrix", "i.gguf", "--make-imatrix", "o.gguf"]


IMATRICES = [
    given("good", "one of the model", GOOD, "passed", code=ACCEPTED),
    given("good-dat", "the older format", as_dat({UP: ONES}), "passed", code=ACCEPTED),
    given("makes-possible", "a level that needs one", GOOD, "passed", code=ACCEPTED, options="--levels IQ2_XXS,Q4_0"),
    case("imatrix-with-files", "quantized files", with_files, "passed", code=ACCEPTED),
    given("empty", "an empty file", b"", "i.gguf is empty (0 bytes)", "etch it again"),
    given("text", "a text", b"some words\n" * 9, "is not a GGUF file", "nor is it a .dat importance matrix", GIVE),
    given("page", "a web page", b"<!DOCTYPE html>", "is a web page", "nor is it a .dat importance matrix", GIVE),
    given("zeros", "zeros", bytes(999), "starts with zeros", "nor is it a .dat importance matrix", GIVE),
    given("model", "the model itself", full(), "i.gguf is a model (llama), not an importance matrix", GIVE),
    given("other-gguf", "a GGUF of something else", build({"general.type": "x"}), "is no importance matrix", GIVE),
    given("no-entries", "one without entries", build(KEYS), "an importance matrix without entries", GIVE),
    given("cut-off", "one that was cut off", GOOD[:-40], "truncated", "etch it again"),
    given("cut-header", "one that was cut off early", GOOD[:90], "truncated", "etch it again"),
    given("version", "a GGUF of version 1", build(KEYS, version=1), "GGUF version 1", code=4),
    given("nan", "a NaN in it", as_gguf({UP: ([*ONES[1:], float("nan")], [1])}), UP, "not finite", "ompute"),
    given("infinite", "an infinity in it", as_dat({UP: [*ONES[1:], float("inf")]}), UP, "not finite", "ompute"),
    given("negative", "a negative sum of squares", as_gguf({UP: ([*ONES[1:], -1], [1])}), UP, "negative", "ompute"),
    given("negative-count", "a negative count", as_gguf({UP: (ONES, [-3])}), "counts of blk.0", "negative", "ompute"),
    given("sums-alone", "sums without counts", build(KEYS, LOST, 256), f"{UP}.counts is missing", "etch it again"),
    given("half", "sums in 16 bit", build(KEYS, HALF, 256), f"{UP}.in_sum2 is F16, not F32", "etch it again"),
    given("uneven", "64 sums for 3 counts", build(KEYS, UNEVEN, 288), "64 sums for 3 counts", "etch it again"),
    given("wide", "of a wider model", as_gguf({UP: (ONES * 2, [1])}), f"its entry for {UP} has 128 values", GIVE),
    given("deep", "of a deeper model", as_gguf({"blk.7.x.weight": (ONES, [1])}), "an entry for blk.7.x.weight", GIVE),
    given("dat-wide", "an older one of a wider model", as_dat({UP: ONES * 2}), "another model", "rows of 64", GIVE),
    given("dat-cut", "an older one, cut off", as_dat({UP: ONES})[:-9], "truncated: entry 1 needs", "etch it again"),
    given("dat-count", "a count that lies", as_dat({UP: ONES}, count=2**31 - 1), "claims 2147483647 entries"),
    given("dat-more", "one entry that is missing", as_dat({UP: ONES}, count=2), "truncated: entry 2", "etch it again"),
    given(
        "dat-values",
        "a number of values that lies",
        as_dat({UP: []})[:-4] + struct.pack("<if", 2**31 - 1, 1),
        "entry 1 needs 8589934588 bytes",
        "etch it again",
    ),
    given("dat-none", "an entry without values", as_dat({UP: []}), "entry 1 claims 0 values", "etch it again"),
    named("missing.gguf", "a name that is not there", "missing.gguf does not exist", "heck the path"),
    named("d", "a folder", "d is a directory", "Give a .gguf file"),
    named("", "a variable that is not set", "the name given as --imatrix is empty", "variable", code=2),
    made("new.gguf", None, "passed", code=ACCEPTED),
    made("a/b/new.gguf", None, "passed", code=ACCEPTED),
    made("old.gguf", lambda folder: put(folder, GOOD, "old.gguf"), "passed", code=ACCEPTED),
    made("", None, "the name given as --make-imatrix is empty", code=2),
    made("-", None, "--make-imatrix -", "Name it so", code=2),
    made("i.dat", None, "--make-imatrix i.dat: the file is a GGUF", "such as imatrix.gguf", code=2),
    made("m.gguf", None, "m.gguf is an input and would be overwritten", "Choose another place"),
    made("t.txt/i.gguf", None, "cannot write t.txt/i.gguf", "Choose another place"),
    made("d.gguf", lambda folder: (folder / "d.gguf").mkdir(), "d.gguf exists and is not a file", "another place"),
    made("o.gguf", lambda folder: put(folder, small(), "o.gguf"), "exists and is not an importance matrix"),
    made("x" * 300 + ".gguf", None, "too long", "Choose another place"),
    made("closed/i.gguf", closed, "cannot be written", "Choose another place", root=False),
    case(
        "make-imatrix-over-the-given",
        "a link to the one that is read",
        over_itself,
        "o.gguf is an input and would be overwritten",
        "Choose another place with --make-imatrix",
    ),
]
