"""Cases about parts of a model: shards of a split one, and raw pieces of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gguf.building import put, put_split, shard
from tests.inputs.case import FULL, ROOM, Build, case, full
from tests.inputs.files import AGAIN


def split(change: Callable[[list[Path]], Path | None], *arguments: str) -> Build:
    """A model of three shards, after a change to them; what it returns is given to qres, else the first."""

    def make(folder: Path) -> Sequence[str]:
        paths = put_split(folder)
        given = change(paths) or paths[0]
        return [*(arguments or ("scan",)), given.name]

    return make


def number(index: int) -> Callable[[list[Path]], Path | None]:
    """One of the shards, none of them changed."""
    return lambda paths: paths[index]


def without(*numbers: int) -> Callable[[list[Path]], Path | None]:
    """Shards that are not there; the first that is, is given."""

    def change(paths: list[Path]) -> Path | None:
        for number in numbers:
            paths[number].unlink()
        return next(path for path in paths if path.exists())

    return change


def instead(number: int, data: bytes) -> Callable[[list[Path]], Path | None]:
    """A shard with other bytes."""

    def change(paths: list[Path]) -> Path | None:
        paths[number].write_bytes(data)
        return None

    return change


def renamed(number: int, name: str, *, given: bool = False) -> Callable[[list[Path]], Path | None]:
    """A shard by another name."""

    def change(paths: list[Path]) -> Path | None:
        new = paths[number].rename(paths[number].with_name(name))
        return new if given else None

    return change


def copied(number: int, name: str) -> Callable[[list[Path]], Path | None]:
    """A shard that is there twice; the one by another name is given."""

    def change(paths: list[Path]) -> Path | None:
        new = paths[number].with_name(name)
        new.write_bytes(paths[number].read_bytes())
        return new

    return change


def swapped_numbers(paths: list[Path]) -> Path | None:
    """Shards 2 and 3 by each other's name."""
    two, three = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(three)
    paths[2].write_bytes(two)
    return None


def pieces(names: Sequence[str], given: str, *more: str) -> Build:
    """A model cut into pieces byte by byte, all of which have names here; `more` are files with the whole model."""

    def make(folder: Path) -> Sequence[str]:
        data, size = full(), -(-len(full()) // len(names))
        for i, name in enumerate(names):
            put(folder, data[i * size : (i + 1) * size], name)
        for name in more:
            put(folder, data, name)
        return ["scan", given]

    return make


SET = [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
MIX = "come from different sets"
SHARDS = [
    *(
        case(
            f"shard-{i + 1}",
            "any part of a whole set",
            split(number(i), "inspect"),
            "3 shards",
            "Tiny",
            code=0,
        )
        for i in range(3)
    ),
    case(
        "first-shard-missing", "parts 2 and 3 of 3", split(without(0)), f"first {SET[0]}", "all parts into one folder"
    ),
    case(
        "last-shard-missing",
        "parts 1 and 2 of 3",
        split(without(2)),
        "1 of the 3 parts",
        SET[2],
        "all parts into one folder",
    ),
    case("two-shards-missing", "part 3 of 3", split(without(0, 1)), "2 of the 3 parts", SET[0], SET[1]),
    case(
        "last-shard-missing-inspected",
        "parts 1 and 2 of 3 to look at",
        split(without(2), "inspect"),
        "incomplete",
        SET[2],
        code=0,
    ),
    case(
        "shard-renamed",
        "a part whose name says nothing",
        split(renamed(1, "m.gguf", given=True)),
        "part 2 of a model split",
        f"call it {SET[1]}",
    ),
    case(
        "shard-downloaded-twice",
        "a browser's name, and the part itself is missing",
        split(renamed(1, "tiny-00002-of-00003 (1).gguf")),
        f"{SET[1]} is missing",
        "'tiny-00002-of-00003 (1).gguf'",
    ),
    case(
        "shard-downloaded-twice-given",
        "the same, given",
        split(renamed(1, "tiny-00002-of-00003 (1).gguf", given=True)),
        "part 2",
        f"all it {SET[1]}",
    ),
    case("shard-in-upper-case", "a part in capital letters", split(renamed(2, SET[2].upper())), SET[2]),
    case("shard-of-another-set", "by its count", split(instead(2, shard(2, 4, []))), "part 3 of 4", MIX),
    case("shard-of-another-model", "by its tensors", split(instead(2, shard(2, 3, FULL[:1]))), "is in", MIX),
    case(
        "shard-with-too-little",
        "a part without its tensors",
        split(instead(2, shard(2, 3, []))),
        "split.tensors.count says 3",
        MIX,
    ),
    case(
        "shards-swapped",
        "parts 2 and 3 by each other's name",
        split(swapped_numbers),
        "says it is part 3 of 3, not part 2",
        MIX,
    ),
    case(
        "shard-cut",
        "a part that is cut off",
        split(instead(1, shard(1, 3, FULL[:2])[:-ROOM])),
        SET[1],
        "truncated",
        AGAIN,
    ),
    case("shard-empty", "a part of 0 bytes", split(instead(2, b"")), SET[2], "is empty", AGAIN),
    case("shard-a-page", "a page in place of a part", split(instead(2, b"<!doctype html>")), SET[2], "web page"),
    case(
        "pieces-part1of2",
        "raw pieces",
        pieces(["m.gguf.part1of2", "m.gguf.part2of2"], "m.gguf.part1of2"),
        "cut into 2 pieces",
        "cat m.gguf.part1of2 m.gguf.part2of2 > m.gguf",
    ),
    case(
        "pieces-second-given",
        "one that does not start like a GGUF",
        pieces(["m.gguf.part1of2", "m.gguf.part2of2"], "m.gguf.part2of2"),
        "cut into 2 pieces",
        "cat m.gguf.part1of2",
    ),
    case(
        "pieces-part-aa",
        "as `split` names them",
        pieces([f"m.gguf.part-a{i}" for i in "abc"], "m.gguf.part-aa"),
        "one piece of m.gguf",
        "cat m.gguf.part-aa m.gguf.part-ab m.gguf.part-ac > m.gguf",
    ),
    case(
        "pieces-one-missing",
        "raw pieces 1 and 3 of 3",
        pieces(["m.gguf.part1of3", "m.gguf.part3of3"], "m.gguf.part1of3"),
        "missing: m.gguf.part2of3",
        "Get the missing pieces",
    ),
    case(
        "pieces-numbered",
        "raw pieces with numbers",
        pieces(["m.gguf.001", "m.gguf.002"], "m.gguf.001"),
        "cat m.gguf.001 m.gguf.002 > m.gguf",
        without=("> m.gguf.",),
    ),
    case(
        "pieces-with-a-space",
        "raw pieces with a space in the name",
        pieces(["a b.gguf.001", "a b.gguf.002"], "a b.gguf.001"),
        "cat 'a b.gguf.001'",
    ),
    case(
        "pieces-joined-already",
        "a raw piece beside the whole file",
        pieces(["m.gguf.1of2", "m.gguf.2of2"], "m.gguf.1of2", "m.gguf"),
        ". m.gguf lies beside it: give that file",
    ),
    case(
        "shard-beside-the-right-one",
        "a part that is there under its right name, too",
        split(copied(1, "tiny-00002-of-00003 (1).gguf")),
        f". {SET[1]} lies beside it: give that file",
    ),
]
