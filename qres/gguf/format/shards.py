"""Which files belong to one model: llama.cpp's sets of shards, by their names and by what their headers say.

The shards of a set are whole GGUF files, each with some of the tensors; the first one also has the model's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qres.errors import QresError
from qres.gguf.format.cursor import Problem
from qres.gguf.format.header import ForeignFormatError, Header, raise_first, read_header
from qres.gguf.format.metadata import Value
from qres.gguf.format.pieces import piece_problem
from qres.gguf.format.tensor import Tensor
from qres.printable import show

# As llama_split_path writes it.
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)
# What browsers and copies make of such a name: "x-00001-of-00003 (1).gguf", "x-00001-of-00003.gguf.1".
_RENAMED = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:\D.*)?\.gguf.*", re.DOTALL | re.ASCII)
_MAX_NAMES = 10  # in one message
_OTHER_SETS = "the parts come from different sets, or were renamed: get them again"


@dataclass(frozen=True)
class Shards:
    """The files of one model that were read."""

    paths: tuple[Path, ...]
    headers: tuple[Header, ...]
    """The header of each path, in the same order."""
    tensors: tuple[Tensor, ...]
    """Over all files; `Tensor.shard` counts in `paths`."""
    count: int
    """Files in the whole set."""
    problems: tuple[Problem, ...]


def read_shards(path: Path, *, tolerant: bool) -> Shards:
    """Read all files of the model that the file at `path` belongs to.

    Raises:
        QresError: as `qres.gguf.model_file.read`.
    """
    header = _read_first(path)
    number, count = position(header.metadata)
    if not tolerant:
        raise_first(header.problems, path)
    if count == 1:
        return Shards((path,), (header,), header.tensors, 1, header.problems)
    paths, problems = _find(path, number, count)
    if not tolerant:
        raise_first(problems, path)
    shards: list[tuple[Path, int, Header]] = []
    for part, shard in paths.items():
        try:
            header = read_header(shard, len(shards), tolerant=tolerant)
        except QresError as error:
            if not tolerant or shard == path:
                raise
            problems.append(Problem(f"incomplete: {error.message}", error.hint, type(error)))
            continue
        shards.append((shard, part, header))
        problems.extend(replace(p, message=f"{p.message} (in {show(shard.name)})") for p in header.problems)
    tensors, mixed = _join(shards, count)
    if not tolerant:
        raise_first(mixed, path)
    headers = tuple(header for *_, header in shards)
    return Shards(tuple(p for p, *_ in shards), headers, tensors, count, (*problems, *mixed))


def _read_first(path: Path) -> Header:
    """The header of the file that was asked for; one piece of a cut file says so first."""
    try:
        header = read_header(path, tolerant=True)
    except ForeignFormatError as error:
        piece = piece_problem(path)
        raise (piece.exception(path) if piece else error) from None
    piece = piece_problem(path) if any(problem.fatal for problem in header.problems) else None
    return replace(header, problems=(piece, *header.problems)) if piece else header


def position(metadata: Mapping[str, Value]) -> tuple[int, int]:
    """What a header says of its file: part number, from 1 on, and how many parts there are."""
    number, count = metadata.get("split.no"), metadata.get("split.count")
    return (
        number + 1 if type(number) is int and number > 0 else 1,
        count if type(count) is int and count > 1 else 1,
    )


def prefix_of(path: Path) -> str:
    """The name of a shard without its numbers; of any other file, the name without suffix."""
    match = _SHARD.fullmatch(path.name)
    return match["prefix"] if match else path.stem


def _find(path: Path, number: int, count: int) -> tuple[dict[int, Path], list[Problem]]:
    """The files of the set that `path` belongs to.

    Args:
        path: Any shard.
        number: Its number by its header, from 1 on.
        count: Shards in the set by its header, 2 or more.

    Returns:
        Number -> file, in order, of those that are there; `path` alone where its name does not lead to the others. And
        what is wrong with the names.
    """
    if number > count:
        return {number: path}, [Problem(f"damaged: it says it is part {number} of {count}", _OTHER_SETS)]
    prefix = _prefix(path, number, count)
    right = f"{prefix or 'NAME'}-{number:05d}-of-{count:05d}.gguf"
    problems = []
    if path.name != right:
        hint = f"llama.cpp finds the parts by name: call it {show(right)}, beside the others"
        if path.with_name(right).exists():
            hint = f"{show(right)} lies beside it: give that file"
        what = f"part {number} of a model split into {count} files, but its name does not say so"
        problems.append(Problem(what, hint))
    if prefix is None:
        return {number: path}, problems
    names = {i: f"{prefix}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)}
    paths = {i: path if i == number else path.with_name(name) for i, name in names.items()}
    missing = {i: name for i, name in names.items() if not paths[i].exists()}
    renamed = {int(m["number"]): p for p, m in _named_like(path, _RENAMED, prefix, count)} if missing else {}
    found = {i: renamed.get(i) if i in missing else paths[i] for i in names}
    problems.extend(_missing(missing, renamed, count))
    return {i: p for i, p in found.items() if p is not None}, problems


def _prefix(path: Path, number: int, count: int) -> str | None:
    """The set's name: by the file's own name, else by the only set beside it that lacks just this part."""
    match = _SHARD.fullmatch(path.name) or _RENAMED.fullmatch(path.name)
    if match and (int(match["number"]), int(match["count"])) == (number, count):
        return match["prefix"]
    others: dict[str, set[int]] = {}
    for _, other in _named_like(path, _SHARD, None, count):
        others.setdefault(other["prefix"], set()).add(int(other["number"]))
    lacking = [prefix for prefix, numbers in others.items() if number not in numbers]
    return lacking[0] if len(lacking) == 1 and not match else None


def _named_like(
    path: Path, pattern: re.Pattern[str], prefix: str | None, count: int
) -> list[tuple[Path, re.Match[str]]]:
    """Other files in the folder of `path` whose names are of a set of that many parts, sorted."""
    try:
        names = sorted(p.name for p in path.parent.iterdir())
    except OSError:  # a folder may be searchable without being readable
        return []
    matches = [(path.with_name(name), pattern.fullmatch(name)) for name in names if name != path.name]
    return [(p, m) for p, m in matches if m and int(m["count"]) == count and prefix in (None, m["prefix"])]


def _missing(missing: Mapping[int, str], renamed: Mapping[int, Path], count: int) -> list[Problem]:
    """The problems of a set without the parts `missing`, of which some are there under a name that browsers give."""
    problems = []
    gone = [name for i, name in missing.items() if i not in renamed]
    if gone:
        listed = ", then ".join(map(show, gone[:_MAX_NAMES])) + (", ..." if len(gone) > _MAX_NAMES else "")
        are = "is" if len(gone) == 1 else "are"
        what = f"incomplete: {len(gone)} of the {count} parts of the set {are} missing, first {listed}"
        problems.append(Problem(what, "put all parts into one folder"))
    for i, name in missing.items():
        if i in renamed:
            what = f"incomplete: {show(name)} is missing, but {show(renamed[i].name)!r} lies beside it"
            problems.append(Problem(what, f"if its download is complete, call it {show(name)}"))
    return problems


def _join(shards: Sequence[tuple[Path, int, Header]], count: int) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """The tensors of all shards, each name once, and what shows that the shards do not belong together.

    Args:
        shards: What was read: file, number by name from 1 on, header.
        count: Shards in the whole set.
    """
    problems = []
    home: dict[str, tuple[Path, Tensor]] = {}
    for path, number, header in shards:
        said = position(header.metadata)
        if said != (number, count):
            what = f"{show(path.name)} says it is part {said[0]} of {said[1]}, not part {number} of {count}"
            problems.append(Problem(f"a mix of sets: {what}", _OTHER_SETS))
        twice = [tensor.name for tensor in header.tensors if tensor.name in home]
        if twice:
            both = f"{show(home[twice[0]][0].name)} and in {show(path.name)}"
            problems.append(Problem(f"a mix of sets: tensor {show(twice[0])!r} is in {both}", _OTHER_SETS))
        for tensor in header.tensors:
            home.setdefault(tensor.name, (path, tensor))
    claimed = shards[0][2].metadata.get("split.tensors.count")
    is_whole = len(shards) == count and not problems and not any(header.problems for *_, header in shards)
    if is_whole and type(claimed) is int and claimed != len(home):
        what = f"its parts hold {len(home)} tensors, split.tensors.count says {claimed}"
        problems.append(Problem(f"a mix of sets: {what}", _OTHER_SETS))
    return tuple(tensor for _, tensor in home.values()), problems
